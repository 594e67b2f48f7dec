"""Run any schedule: each rank executes the actions of its program, one after the other.

Results wait in a table under the names of the actions that produced them: the tensors that `1F0` returns are the input
of `2F0`, and the gradients that `2B0` returns are the input of `1B0`. If the other stage is on another rank, SEND takes
the result from the table of one rank, and RECV puts it into the table of the other.

Nothing waits before it must: RECV only posts a receive, and the action that needs the result waits for it; SEND only
starts a message; R only starts the reduction of a stage's gradients.
"""

from collections import defaultdict, deque
from collections.abc import MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.pipeline_parallel.pipeline_parallel import sum_losses
from picotron.process_group_manager import ProcessGroupManager, first_communication, new_groups
from workbench.pipelines.modules import (
    Graph,
    Message,
    PipelineStages,
    backward,
    graph_of,
    tensors,
    with_gradients,
)
from workbench.pipelines.recorder import Recorder, record_action
from workbench.pipelines.split_backward import DeferredGrads, defer_weight_grads, run_deferred
from workbench.schedules.actions import Action, AnyAction, Schedule
from workbench.schedules.checker import MAX_SENDS_IN_FLIGHT, add_communication

reverse_groups: MutableMapping[ProcessGroupManager, dist.ProcessGroup] = WeakKeyDictionary()


def reverse_group() -> dist.ProcessGroup:
    """Return another group of the same ranks as the grid's `pp_group`, for messages to lower pp ranks, see
    `start_message`. The first call creates it, on all ranks.
    """
    grid = pgm.process_group_manager
    if grid not in reverse_groups:
        group = new_groups(grid.grid.movedim(1, -1).reshape(-1, grid.pp_world_size).tolist())
        assert group is not None
        first_communication(group)
        reverse_groups[grid] = group
    return reverse_groups[grid]


class Executor:
    """A training step of a `PipelineStages` in a `DataParallel`, or its evaluation, that follows a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        reverse_group()  # before any rank needs it
        self.program = add_communication(schedule)[pgm.process_group_manager.pp_rank]

    def __call__(self, model: Any, data_loader: Any, device: torch.device, recorder: Recorder | None = None) -> Tensor:
        """Run one step.

        Args:
            model: a `PipelineStages` in a `DataParallel`; for an evaluation, also without.
            data_loader: the micro-batches of this rank's pipeline, see `BatchList`.
            device: where messages arrive.
            recorder: gets the times of the actions.

        Returns:
            See `train_step_pipeline_afab`.

        Raises:
            UserError: the loader has another number of micro-batches than the schedule.
        """
        if (count := data_loader.grad_acc_steps) != (expected := self.schedule.micro_batches):
            raise UserError(f"the schedule is for {expected} micro-batches, not {count}; make them equal")
        forward_only = self.schedule.forward_only
        batches = [next(data_loader) for _ in range(self.schedule.micro_batches)]
        model.require_backward_grad_sync = False  # R starts the reductions instead
        step = StepState(self.schedule, model, batches, device, recorder)
        with torch.set_grad_enabled(not forward_only):
            for action in self.program:
                step.run(action)
        step.finish()
        if not forward_only:
            model.finish_grad_sync()
        return sum_losses(step.losses, device)


def check_outputs(stage: int, outputs: tuple[Tensor, ...], likes: tuple[Tensor, ...], device: torch.device) -> None:
    """Raise ValueError if the outputs of a stage do not fit into the buffers of the next one."""
    if len(outputs) != len(likes):
        raise ValueError(
            f"stage {stage} returned {len(outputs)} tensors, but stage {stage + 1} receives {len(likes)}; make `receives` "
            f"describe what the stage returns"
        )
    for y, like in zip(outputs, likes, strict=True):
        if (y.shape, y.device.type, y.dtype) != (like.shape, device.type, like.dtype):
            raise ValueError(
                f"stage {stage} cannot send {y.dtype} {list(y.shape)} on {y.device}: the receiver expects {like.dtype} "
                f"{list(like.shape)} on {device}; change the stage's output, or `receives`"
            )


def start_message(operation: str, tensors: Sequence[Tensor], rank: int) -> list[dist.Work]:
    """Start to send tensors, or to receive into them, in one batch. Returns the handles to wait for.

    Messages to lower pp ranks have a separate group. NCCL runs the operations of a group one after the other, so in a
    single group, a message that waits for its peer would also delay this rank's later messages in the other direction.

    Args:
        operation: "send" or "recv".
        rank: pp rank at the other end.
    """
    grid, kinds = pgm.process_group_manager, {"send": dist.isend, "recv": dist.irecv}
    sender, receiver = (grid.pp_rank, rank) if operation == "send" else (rank, grid.pp_rank)
    group = grid.pp_group if sender < receiver else reverse_group()
    batch = [dist.P2POp(kinds[operation], tensor, grid.pp_group_ids[rank], group) for tensor in tensors]
    return dist.batch_isend_irecv(batch) if batch else []


class StepState:
    """The state of one step on one rank, and a method for each kind of action.

    Attributes:
        losses: losses of the micro-batches, on the rank with the last stage.
        results: outputs and gradients that wait for the action that needs them, by the action that produced them.
        activations: (inputs, graph of the outputs) of each (stage, micro-batch) that waits for its backward.
        deferred: the weight gradients of each (stage, micro-batch) that wait for their W.
        pending_recvs: receives that have been posted, by the action that produces their result on the other rank.
        pending_sends: messages that have been started, with their tensors, by receiving pp rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: Any,
        batches: list[dict[str, Any]],
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self.schedule, self.model, self.batches, self.device = schedule, model, batches, device
        self.recorder = recorder
        self.pipeline: Any = model if isinstance(model, PipelineStages) else model.module
        self.losses: list[Tensor] = []
        self.results: dict[Action, tuple[Tensor, ...]] = {}
        self.activations: dict[tuple[int, int], tuple[tuple[Tensor, ...], Graph]] = {}
        self.deferred: dict[tuple[int, int], DeferredGrads] = {}
        self.pending_recvs: dict[Action, list[dist.Work]] = {}
        self.pending_sends: dict[int, deque[tuple[list[dist.Work], list[Tensor]]]] = defaultdict(deque)
        self.run_kind = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weight,
            "R": self.reduce_grads,
            "SEND": self.send,
            "RECV": self.recv,
        }

    def run(self, action: AnyAction) -> None:
        """Run an action. The parts of an overlapped pair, which has one name, run one after the other: backward first,
        because it frees memory. On a GPU their communication still overlaps where it is asynchronous.

        More overlap would take a stream for each part. Since NCCL runs the operations of a communicator in the order of
        the calls, whatever the stream, it would also take separate communicators for the tensor- and context-parallel
        collectives of each part. (DualPipe hides the all-to-alls of experts, which picotron does not have.)
        """
        parts = action.parts[::-1]
        for part in parts:
            self.wait_for_input(part)  # outside of the action's recorded time
        with record_action(str(action), self.recorder):
            for part in parts:
                self.run_kind[part.kind.partition("_")[0]](part)

    def finish(self) -> None:
        """Wait for the last messages."""
        for receiver in self.pending_sends:
            self.wait_for_sends(receiver, 0)
        left = (self.results, self.pending_recvs, self.activations, self.deferred)
        assert not any(left), "a program left results, receives, activations or weight gradients behind"

    def forward(self, action: Action) -> None:
        _, stage, i = action
        inputs = self.take_input(action)
        for x in with_gradients(inputs):
            x.requires_grad_(torch.is_grad_enabled())
        message = inputs[0] if isinstance(self.received(stage, i), Tensor) else inputs or None
        y: Any = self.model(**self.batches[i] | {"hidden_states": message}, stage=stage, micro_batch=i)
        if stage == self.schedule.num_stages - 1:
            y = y / self.schedule.micro_batches  # so that gradients sum up to those of the mean
            self.losses.append(y.detach())
        else:
            check_outputs(stage, tensors(y), tensors(self.received(stage + 1, i)), self.device)
            self.results[action] = tuple(each.detach() for each in tensors(y))
            y = with_gradients(y)
        if not self.schedule.forward_only:
            self.activations[stage, i] = inputs, graph_of(y)

    def received(self, stage: int, i: int) -> Message | None:
        """Return meta tensors like those that a stage receives for micro-batch i, None for the first stage."""
        return self.pipeline.receives(stage, self.batches[i]) if stage > 0 else None

    def backward(self, action: Action) -> None:
        _, stage, i = action
        is_last = stage == self.schedule.num_stages - 1
        dy = (None,) if is_last else self.take_input(action)
        dx = backward(*self.activations.pop((stage, i)), dy)
        if stage > 0:
            self.results[action.result] = dx

    def backward_input(self, action: Action) -> None:
        with defer_weight_grads() as deferred:
            try:
                self.backward(action)
            except (TypeError, AttributeError) as error:
                if any(parameter._backward_hooks for parameter in self.model.parameters()):
                    raise UserError(
                        f"a backward that is split failed: {error}. It also calls the hooks of a weight with None, before the "
                        f"weight's gradient is computed; let them return None then"
                    ) from error
                raise
        self.deferred[action.stage, action.micro_batch] = deferred

    def backward_weight(self, action: Action) -> None:
        run_deferred(self.deferred.pop((action.stage, action.micro_batch)))

    def reduce_grads(self, action: Action) -> None:
        self.model.start_grad_sync(action.stage)

    def send(self, message: Action) -> None:
        """Start to send a result to the stage that needs it, after a wait for earlier messages if too many are in
        flight. This cannot deadlock, because both ends have the same order of messages.
        """
        result = message._replace(kind=message.kind[-1])
        target = self.schedule.target(result)
        assert target is not None
        receiver, content = self.schedule.rank_of(target), [each.contiguous() for each in self.results.pop(result)]
        self.wait_for_sends(receiver, MAX_SENDS_IN_FLIGHT - 1)
        self.pending_sends[receiver].append((start_message("send", content, receiver), content))

    def recv(self, message: Action) -> None:
        """Start to receive the input of an action."""
        source = self.schedule.source(message._replace(kind=message.kind[-1]))
        assert source is not None
        likes = tensors(self.received(max(message.stage, source.stage), message.micro_batch))
        if source.kind != "F":  # the gradients of what this stage has sent
            likes = with_gradients(likes)
        self.results[source] = tuple(torch.empty(like.shape, dtype=like.dtype, device=self.device) for like in likes)
        self.pending_recvs[source] = start_message("recv", self.results[source], self.schedule.rank_of(source.stage))

    def wait_for_sends(self, receiver: int, left: int) -> None:
        """Wait for messages to a rank, oldest first, and free their tensors, until at most `left` are in flight."""
        while len(self.pending_sends[receiver]) > left:
            works, _ = self.pending_sends[receiver].popleft()
            for work in works:
                work.wait()

    def wait_for_input(self, action: Action) -> None:
        source = self.schedule.source(action)
        for work in self.pending_recvs.pop(source, ()) if source else ():
            work.wait()

    def take_input(self, action: Action) -> tuple[Tensor, ...]:
        """Take the result of another stage that an action needs; none at the ends of the pipeline."""
        source = self.schedule.source(action)
        return () if source is None else self.results.pop(source)
