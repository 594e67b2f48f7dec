"""Picture of a recorded step of 4D training: what one rank computes, and below it its messages, a row for each axis.

python -m docs.programs.step_picture step --out docs/pictures/step.svg

Sixteen processes train with dp 2 x pp 2 x cp 2 x tp 2; rank 0 notes when its calls begin, and when
their waits end. The picture shows its fastest step, in which other processes of the machine disturb least.
"""

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig

import train
from docs.programs.svg import TENSORS, Span, main, spans
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.optimizer import AdamW
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.tensor_parallel import tp_communications
from workbench.drawing.draw_svg import COLOURS
from workbench.explain.fake_group import axis_of
from workbench.run.config_reader import load_config
from workbench.run.metrics import Metrics
from workbench.run.ranks import run_ranks

SIZES = {f"distributed.{axis}_size": "2" for axis in ("dp", "pp", "cp", "tp")} | {
    "distributed.sequence_parallel": "true"
}
SHORT = {"training.gradient_accumulation_steps": "2", "training.total_train_steps": "20", "training.num_samples": "200"}
LAYOUT = [word for key, value in (SIZES | SHORT).items() for word in (f"--{key}", value)]
ROWS = {  # by the groups of `axis_of`
    "computes": "rank 0 computes",
    "pp": "pp: hidden states, gradients",
    "tp": "tp: gather, reduce-scatter",
    "cp": "cp: keys and values",
    "cp_dp": "dp and cp: gradients",
    "world": "all ranks: the norm",
}


@dataclasses.dataclass
class Call:
    """A box of the picture, in seconds."""

    row: str
    name: str
    start: float
    end: float


class Recorder:
    """The calls of each step of this rank."""

    def __init__(self) -> None:
        self.steps: list[list[Call]] = [[]]

    def noting(self, function: Callable[..., Any], describe: Callable[..., tuple[str, str]]) -> Callable[..., Any]:
        """Return a function that notes when it is called, and when it returns or (of messages) when it is waited for.

        Args:
            describe: function that returns the row and the name of a call.
        """

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            noted = Call(*describe(*arguments, **options), time.perf_counter(), 0)
            self.steps[-1].append(noted)
            result = function(*arguments, **options)
            noted.end = time.perf_counter()
            if isinstance(result, list):
                return [Noted(work, noted) for work in result]
            return Noted(result, noted) if isinstance(result, dist.Work) else result

        return call

    def computes(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.noting(function, lambda *_, **__: ("computes", name))

    def collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.noting(function, lambda *_, group=None, **__: (row_of(group or dist.group.WORLD), name))

    def messages(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def describe(operations: list[dist.P2POp]) -> tuple[str, str]:
            return row_of(operations[0].group), " and ".join(each.op.__name__ for each in operations)

        return self.noting(function, describe)


def row_of(group: Any) -> str:
    """Return the axis of a group; that of both ranks that hold the tied embedding is a part of a pp group."""
    return axis_of(group).removeprefix("within ")


class Noted:
    """The handle of a message, which notes when it has arrived."""

    def __init__(self, work: Any, call: Call) -> None:
        self.work, self.call = work, call

    def wait(self) -> None:
        self.work.wait()
        self.call.end = time.perf_counter()


def record(out: Path, config: Config, model_config: PreTrainedConfig) -> None:
    """Train on this rank. Rank 0 draws the recorded step."""
    recorder, start_step = Recorder(), Metrics.start_step

    def start(self: Metrics) -> None:
        start_step(self)
        dist.barrier()  # a rank that was late in the step before is not late in this one
        recorder.steps.append([])

    patched: Any = dist
    patched.all_reduce = recorder.collective("all-reduce", dist.all_reduce)
    patched.batch_isend_irecv = recorder.messages(dist.batch_isend_irecv)
    for name, operation in (("all_gather_single", "all-gather"), ("reduce_scatter_single", "reduce-scatter")):
        setattr(tp_communications, name, recorder.collective(operation, getattr(tp_communications, name)))
    parts: Any = PipelineParallel
    parts.forward, parts.backward = recorder.computes("F", parts.forward), recorder.computes("B", parts.backward)
    optimizer: Any = AdamW
    optimizer.step = recorder.computes("update", optimizer.step)
    Metrics.start_step = start  # type: ignore[method-assign]
    train.train(config, model_config, None)
    if pgm.process_group_manager.global_rank == 0:
        out.write_text(draw(min(map(up_to_the_update, recorder.steps[2:-1]), key=duration)))


def up_to_the_update(calls: list[Call]) -> list[Call]:
    return calls[: next(i for i, noted in enumerate(calls) if noted.name == "update") + 1]


def duration(calls: list[Call]) -> float:
    return calls[-1].end - calls[0].start


def colour_of(call: Call) -> str:
    """Return the colour of a computation, or of what a message carries."""
    if call.row == "computes":
        return COLOURS.get(call.name, TENSORS["optimizer"])
    return COLOURS["R"] if call.row in ("cp_dp", "world") else TENSORS["activations"]


def draw(calls: list[Call]) -> str:
    """Draw the calls of a step."""
    begin = calls[0].start
    drawn = [
        Span(
            ROWS[call.row], 1000 * (call.start - begin), 1000 * (call.end - begin), colour_of(call),
            call.name if call.row == "computes" else "", f"{call.name}: {1000 * (call.end - call.start):.1f} ms",
        )
        for call in calls
    ]  # fmt: skip
    return spans({"A step": drawn}, [*ROWS.values()], "ms, sixteen processes on one machine", left=250)


def step() -> str:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(["--config", "docs/small.json", "--checkpoint.save_dir", folder, *LAYOUT])
        model_config, _ = train.check(config)
        out = Path(folder) / "step.svg"
        run_ranks(config.distributed.world_size, functools.partial(record, out, config, model_config))
        return out.read_text()


if __name__ == "__main__":
    main(__doc__, step)
