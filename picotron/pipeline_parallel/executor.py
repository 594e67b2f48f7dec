"""Runs any schedule: a rank does the actions of its program one after the other.

Results wait in one table for whoever needs them, under the names of the actions that make them: the hidden states that
`1F0` returns are what `2F0` takes, and the gradient that `2B0` returns is what `1B0` takes. If the other stage is on
another rank, SEND takes a result from the table there, and RECV puts it in the table here.

Nothing waits before it has to: a RECV only asks for a message, and the action that uses it waits; a SEND only begins;
an R lets the reduction of a stage's gradients begin.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.pipeline_parallel.actions import Action, AnyAction, Schedule
from picotron.pipeline_parallel.checker import add_communication
from picotron.pipeline_parallel.pipeline_parallel import (
    evaluate,
    finish_step,
    total,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.pipeline_parallel.plan import Plan
from picotron.pipeline_parallel.pp_communications import check_message, start
from picotron.pipeline_parallel.recorder import action as named
from picotron.pipeline_parallel.schedules import forward_only
from picotron.split_backward import Later, defer, run

UNDERWAY = 2  # messages to the same rank that may be on their way at a time; each holds the memory of an output


class Executor:
    """A step of a schedule, to be called as the hand-written ones, `train_step_pipeline_1f1b`.

    Raises:
        UserError: the schedule is not whole, or would not finish, see `checker`.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.program = add_communication(schedule)[pgm.process_group_manager.pp_rank]

    def __call__(
        self, model: Any, data_loader: Any, tensor_shapes: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """The arguments and the result are those of `train_step_pipeline_afab`."""
        self.model, self.message = model, (tensor_shapes, device, dtype)
        self.batches = [next(data_loader) for _ in range(self.schedule.microbatches)]
        self.losses: list[Tensor] = []
        self.results: dict[Action, Tensor] = {}
        self.arriving: dict[Action, list[dist.Work]] = {}  # messages for the results of these actions
        self.leaving: dict[int, deque[tuple[list[dist.Work], Tensor]]] = defaultdict(deque)  # by receiver
        self.saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (x, y) that wait for their backward
        self.later: dict[tuple[int, int], Later] = {}  # what W has to do
        model.require_backward_grad_sync = False  # that is what R is for
        with torch.set_grad_enabled(not self.schedule.forward_only):
            for action in self.program:
                self.do(action)
        for receiver in self.leaving:
            self.wait_for_sends(receiver, 0)
        assert not any((self.results, self.arriving, self.saved, self.later)), "a program left something behind"
        return total(self.losses, device) if self.schedule.forward_only else finish_step(model, self.losses, device)

    def do(self, action: AnyAction) -> None:
        """The parts of an overlapped pair, which is one action with one name, run one after the other: backward first,
        as it frees memory. A GPU's communication inside of them still overlaps, as far as it is asynchronous.
        """
        parts = action.parts[::-1]
        for part in parts:
            self.wait_for_input(part)  # not in the action's own time
        with named(str(action)):
            for part in parts:
                getattr(self, part.kind)(part)

    def F(self, action: Action) -> None:
        _, stage, i = action
        x = self.take_input(action)
        if x is not None:
            x.requires_grad_(torch.is_grad_enabled())
        y = self.model(**self.batches[i] | {"hidden_states": x}, stage=stage)
        if stage == self.schedule.num_stages - 1:
            y = y / self.schedule.microbatches  # so that gradients add up to those of the mean
            self.losses.append(y.detach())
        else:
            self.results[action] = y.detach()
        if not self.schedule.forward_only:
            self.model.module.deallocate_output_tensor(y)  # the result has the data, until it has been sent or used
            self.saved[stage, i] = x, y

    def B(self, action: Action) -> None:
        _, stage, i = action
        dx = self.model.module.backward(*self.saved.pop((stage, i)), self.take_input(action))
        if dx is not None:
            self.results[action.result] = dx

    def I(self, action: Action) -> None:  # noqa: E743
        with defer() as later:
            self.B(action)
        self.later[action.stage, action.microbatch] = later

    def W(self, action: Action) -> None:
        run(self.later.pop((action.stage, action.microbatch)))

    def R(self, action: Action) -> None:
        self.model.start_grad_sync(action.stage)

    def SEND_F(self, action: Action) -> None:
        self.send(action._replace(kind="F"), action.stage + 1)

    def SEND_B(self, action: Action) -> None:
        self.send(action._replace(kind="B"), action.stage - 1)

    def RECV_F(self, action: Action) -> None:
        self.receive(action._replace(kind="F"))

    def RECV_B(self, action: Action) -> None:
        self.receive(action._replace(kind="B"))

    def send(self, result: Action, stage: int) -> None:
        """Begin to send a result to a stage. (Whatever came before it can arrive: both ends have the same order.)"""
        receiver, tensor = self.schedule.rank_of(stage), self.results.pop(result).contiguous()
        check_message(tensor, *self.message)
        self.wait_for_sends(receiver, UNDERWAY - 1)
        self.leaving[receiver].append((start("send", tensor, receiver), tensor))

    def receive(self, action: Action) -> None:
        """Begin to receive what an action needs."""
        source = self.schedule.source(action)
        assert source is not None
        shapes, device, dtype = self.message
        self.results[source] = torch.empty(shapes, device=device, dtype=dtype)
        self.arriving[source] = start("recv", self.results[source], self.schedule.rank_of(source.stage))

    def wait_for_sends(self, receiver: int, left: int) -> None:
        """Free messages to a rank, the oldest first, but for so many that may still be on their way."""
        while len(self.leaving[receiver]) > left:
            works, _ = self.leaving[receiver].popleft()
            for work in works:
                work.wait()

    def wait_for_input(self, action: Action) -> None:
        source = self.schedule.source(action)
        for work in self.arriving.pop(source, ()) if source else ():
            work.wait()

    def take_input(self, action: Action) -> Tensor | None:
        """What another stage made for this action; None at the ends of the pipeline."""
        source = self.schedule.source(action)
        return None if source is None else self.results.pop(source)


def pick_pipeline_step(
    config: Config, plan: Plan, tensor_shapes: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Callable[[Any, Any], Tensor]:
    """The training step of a pipeline: AFAB and 1F1B are hand-written, all else is a program."""
    loops = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}
    step = loops.get(config.distributed.pp_engine) or Executor(plan.schedule)
    return functools.partial(step, tensor_shapes=tensor_shapes, device=device, dtype=dtype)


def pick_evaluation(
    config: Config, plan: Plan, tensor_shapes: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Callable[[Any, Any], Tensor]:
    """The mean loss over the next `eval_steps` global batches, of a model and a data loader: see `evaluate`."""
    training, schedule = config.training, plan.schedule
    if schedule.chunks == 1:
        return functools.partial(
            evaluate, eval_steps=training.eval_steps, tensor_shapes=tensor_shapes, device=device, dtype=dtype
        )
    microbatches = training.eval_steps * training.gradient_accumulation_steps
    executor = Executor(forward_only(schedule.pp, microbatches, schedule.chunks, schedule.placement))
    return functools.partial(executor, tensor_shapes=tensor_shapes, device=device, dtype=dtype)
