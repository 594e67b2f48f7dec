"""What a rank does, by name: in the log, in profiler traces, and with its times in the trace of a step."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.errors import UserError
from picotron.schedules.actions import parse_action
from picotron.schedules.simulate import Span
from picotron.schedules.trace import trace_line, trace_path

logger = logging.getLogger("picotron.pipeline")


class Recorder:
    """Writes down when the actions of this rank run. A GPU works behind the CPU's back, so here the CPU waits for it:
    the times are true, but a step that is recorded is a little slower. (It waits for the computations alone. Messages
    have streams of their own, and go on meanwhile.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.spans = device, list[Span]()
        dist.barrier(pgm.process_group_manager.pp_group)  # so that all ranks begin to count at the same time
        self.began = time.perf_counter()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - self.began


recorder: Recorder | None = None  # in steps that are recorded


@contextlib.contextmanager
def record_action(name: str) -> Iterator[None]:
    """Something that is called 2F3, the forward of micro-batch 3 in stage 2, or just F3 where a rank has one stage."""
    grid = pgm.process_group_manager
    has_stage = not name[0].isalpha()
    logger.debug("[rank %d%s] %s", grid.global_rank, "" if has_stage else f", stage {grid.pp_rank}", name)
    with record_function(name):
        if recorder is None:
            yield
            return
        start = recorder.now()
        yield
        done = parse_action(name if has_stage else f"{grid.pp_rank}{name}")
        recorder.spans.append(Span(done, start, recorder.now()))


def record_steps(
    take_step: Callable[..., Tensor], config: Config, device: torch.device, done: int
) -> Callable[..., Tensor]:
    """`take_step`, with a file for each step of `logging.trace_steps`, see `trace`: when the first pipeline did what.

    Args:
        done: how many steps came before.
    """
    numbers = itertools.count(done + 1)

    def step(*arguments: Any) -> Tensor:
        global recorder
        number = next(numbers)
        if number not in (config.logging.trace_steps or ()):
            return take_step(*arguments)
        recorder = Recorder(device)
        try:
            loss = take_step(*arguments)
            write_trace(config.checkpoint.save_dir, number, recorder.spans)
        finally:
            recorder = None
        return loss

    return step


def write_trace(save_dir: str, step: int, spans: list[Span]) -> None:
    """Collect what the ranks of a pipeline have recorded. The first pipeline writes its file."""
    grid = pgm.process_group_manager
    everyone: list[Any] = [None] * grid.pp_world_size
    dist.all_gather_object(everyone, spans, group=grid.pp_group)
    if grid.global_rank > 0:
        return
    lines = [trace_line(rank, span) + "\n" for rank, theirs in enumerate(everyone) for span in theirs]
    path = trace_path(save_dir, step)
    try:
        path.write_text("".join(lines))
    except OSError as error:
        raise UserError(f"the trace {path} cannot be written: {error.strerror}") from None
    logger.info("the trace of step %d is in %s", step, path)
