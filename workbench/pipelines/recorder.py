"""Recording of a rank's actions: by name in the log and in profiler traces, and with times in the trace of a step."""

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
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from workbench.files import write_atomically
from workbench.pipelines.plan import SchedulePlan, settings_of
from workbench.run.run_folder import user_error_on_failure
from workbench.schedules.actions import parse_action
from workbench.schedules.simulate import Span
from workbench.schedules.trace import settings_line, trace_line, trace_path

logger = logging.getLogger("picotron.pipeline")


class Recorder:
    """Start and end times of this rank's actions, in seconds since the recorder was created.

    A GPU computes asynchronously, so the recorder waits for it before it reads the clock: times are those of the
    computations, but a recorded step is slightly slower. (Messages run on separate streams and are not waited for.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.spans = device, list[Span]()
        dist.barrier(pgm.process_group_manager.pp_group)  # so that all pp ranks start their clocks at the same time
        self.start_time = time.perf_counter()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - self.start_time


@contextlib.contextmanager
def record_action(name: str, recorder: Recorder | None = None) -> Iterator[None]:
    """Log an action, name it in profiles, and record its times: 2F3 is the forward of micro-batch 3 on stage 2."""
    logger.debug("[rank %d] %s", pgm.process_group_manager.global_rank, name)
    with record_function(name):
        if recorder is None:
            yield
            return
        start = recorder.now()
        yield
        recorder.spans.append(Span(parse_action(name), start, recorder.now()))


def record_steps(
    take_step: Callable[..., Tensor],
    config: Config,
    model_config: PreTrainedConfig,
    plan: SchedulePlan,
    device: torch.device,
    done: int,
) -> Callable[..., Tensor]:
    """Return `take_step` with recording: each step of `logging.trace_steps` writes the first pipeline's actions and
    their times to a file, see `trace`.

    Args:
        take_step: a step that also takes a recorder, see `Executor`.
        done: number of steps completed before.
    """
    numbers, settings = itertools.count(done + 1), settings_of(config, model_config, plan.stages)

    def step(*arguments: Any) -> Tensor:
        number = next(numbers)
        if number not in (config.logging.trace_steps or ()):
            return take_step(*arguments)
        recorder = Recorder(device)
        loss = take_step(*arguments, recorder=recorder)
        write_trace(config.checkpoint.save_dir, number, recorder.spans, settings)
        return loss

    return step


def write_trace(save_dir: str, step: int, spans: list[Span], settings: dict[str, Any]) -> None:
    """Gather the recorded spans of a pipeline's ranks, and write the settings and the spans of the first pipeline to a
    file.
    """
    grid = pgm.process_group_manager
    spans_by_rank: list[Any] = [None] * grid.pp_world_size
    dist.all_gather_object(spans_by_rank, spans, group=grid.pp_group)
    if grid.global_rank > 0:
        return
    lines = [trace_line(rank, span) + "\n" for rank, rank_spans in enumerate(spans_by_rank) for span in rank_spans]
    path = trace_path(save_dir, step)
    with user_error_on_failure(path):
        write_atomically(path, "".join([settings_line(settings) + "\n", *lines]))
    logger.info("trace of step %d written to %s", step, path)
