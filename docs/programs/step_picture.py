"""Picture of a recorded step of 4D training: what one rank computes, and below it its messages, a row for each axis.

python -m docs.programs.step_picture --out docs/pictures/step.svg

Sixteen processes train with dp 2 x pp 2 x cp 2 x tp 2; rank 0 notes when its calls begin, and when
their waits end. The picture shows its fastest step, in which other processes of the machine disturb least.
"""

import argparse
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
from docs.programs.svg import LINE, TENSORS, WIDTH, Svg
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
class Span:
    """A box of the picture, in seconds."""

    row: str
    name: str
    start: float
    end: float


class Recorder:
    """The spans of each step of this rank."""

    def __init__(self) -> None:
        self.steps: list[list[Span]] = [[]]

    def begin(self, row: str, name: str) -> Span:
        span = Span(row, name, time.perf_counter(), 0)
        self.steps[-1].append(span)
        return span

    def computes(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one, and notes its time."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            span = self.begin("computes", name)
            result = function(*arguments, **options)
            span.end = time.perf_counter()
            return result

        return call

    def collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that notes the time until it is waited for."""

        def call(*arguments: Any, group: Any = None, **options: Any) -> Any:
            span = self.begin(row_of(group or dist.group.WORLD), name)
            work = function(*arguments, group=group, **options)
            span.end = time.perf_counter()
            return work and Noted(work, span)

        return call

    def messages(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `batch_isend_irecv` with the time until the last message has arrived."""

        def call(operations: list[dist.P2POp]) -> list[Any]:
            span = self.begin(row_of(operations[0].group), " and ".join(each.op.__name__ for each in operations))
            return [Noted(work, span) for work in function(operations)]

        return call


def row_of(group: Any) -> str:
    """Return the axis of a group; that of both ranks that hold the tied embedding is a part of a pp group."""
    return axis_of(group).removeprefix("within ")


class Noted:
    """The handle of a message, which notes when it has arrived."""

    def __init__(self, work: Any, span: Span) -> None:
        self.work, self.span = work, span

    def wait(self) -> None:
        self.work.wait()
        self.span.end = time.perf_counter()


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


def up_to_the_update(spans: list[Span]) -> list[Span]:
    return spans[: next(i for i, span in enumerate(spans) if span.name == "update") + 1]


def duration(spans: list[Span]) -> float:
    return spans[-1].end - spans[0].start


def colour_of(span: Span) -> str:
    """Return the colour of a computation, or of what a message carries."""
    if span.row == "computes":
        return COLOURS.get(span.name, TENSORS["optimizer"])
    return COLOURS["R"] if span.row in ("cp_dp", "world") else TENSORS["activations"]


def draw(spans: list[Span]) -> str:
    """Draw the spans of a step."""
    begin, left, row, gap = spans[0].start, 250, 30, 6
    scale = (WIDTH - left - 10) / duration(spans)
    picture = Svg(WIDTH, len(ROWS) * (row + gap) + LINE + 54)
    for index, title in enumerate(ROWS.values()):
        picture.text(0, LINE + index * (row + gap) + 21, title)
        picture.frame(left, LINE + index * (row + gap), WIDTH - left - 10, row)
    for span in spans:
        title = f"{span.name}: {1000 * (span.end - span.start):.1f} ms"
        x, width = left + (span.start - begin) * scale, max(1.5, (span.end - span.start) * scale)
        y = LINE + [*ROWS].index(span.row) * (row + gap)
        picture.box(x, y, width, row, colour_of(span), span.name if span.row == "computes" else "", title)
    bottom = LINE + len(ROWS) * (row + gap)
    every = max(10, round(100 * duration(spans), -1))  # about ten numbers
    unit = "ms, sixteen processes on one machine"
    picture.time_axis(left, bottom, scale / 1000, 1000 * duration(spans), int(every), unit)
    return str(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a step of 4D training, and draw it.")
    parser.add_argument("--out", type=Path, required=True, help="the .svg file to write")
    out = parser.parse_args().out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(["--config", "docs/small.json", "--checkpoint.save_dir", folder, *LAYOUT])
        model_config, _ = train.check(config)
        run_ranks(config.distributed.world_size, functools.partial(record, out, config, model_config))


if __name__ == "__main__":
    main()
