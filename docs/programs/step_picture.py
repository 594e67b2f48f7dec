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

    def note(self, owner: Any, name: str, shown: str, row: Callable[..., str] = lambda *_, **__: "computes") -> None:
        """Replace a function by one that notes when it is called, and when it returns or (of messages) is waited for.

        Args:
            owner, name: its module or class, and its name there.
            shown: name of its calls.
            row: function of its arguments that returns the row of a call.
        """
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            noted = Call(row(*arguments, **options), shown, time.perf_counter(), 0)
            self.steps[-1].append(noted)
            result = function(*arguments, **options)
            noted.end = time.perf_counter()
            if isinstance(result, list):
                return [Noted(work, noted) for work in result]
            return Noted(result, noted) if isinstance(result, dist.Work) else result

        setattr(owner, name, call)


def row_of(*operations: Any, group: Any = None, **_: Any) -> str:
    """Return the axis of a collective or of messages; that of the ranks that hold a tied embedding is a part of pp."""
    if isinstance(operations[0], list):
        group = operations[0][0].group
    members: Any = group or dist.group.WORLD
    return axis_of(members).removeprefix("within ")


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

    recorder.note(PipelineParallel, "forward", "F")
    recorder.note(PipelineParallel, "backward", "B")
    recorder.note(AdamW, "step", "update")
    recorder.note(dist, "all_reduce", "all-reduce", row_of)
    recorder.note(dist, "batch_isend_irecv", "message", row_of)
    recorder.note(tp_communications, "all_gather_single", "all-gather", row_of)
    recorder.note(tp_communications, "reduce_scatter_single", "reduce-scatter", row_of)
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
