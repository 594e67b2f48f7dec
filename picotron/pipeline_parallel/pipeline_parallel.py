"""Pipeline parallelism: each stage holds some of the layers, and micro-batches flow through the stages.

Hidden states (B, T, D) travel to the next stage, and their gradients back to the previous one. At the beginning and at
the end of a step, stages wait for them: this bubble takes (p - 1) / (m + p - 1) of the time for p stages and m
micro-batches. Two schedules, for 3 stages and 4 micro-batches, where a backward (B) takes as long as two forwards (F):

    AFAB, all forward, all backward
        F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
        .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3 .. ..
        .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. .. .. ..

    1F1B, one forward, one backward
        F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3
        .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..
        .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..

Both have the same bubble. But a micro-batch's activations stay in memory from its forward to its backward: AFAB holds
up to m micro-batches, and 1F1B holds up to p - (pp rank).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from picotron import process_group_manager as pgm
from picotron.model.llama import Llama
from picotron.model.placement import place
from picotron.pipeline_parallel.pp_communications import bidirectional_pipeline_communicate, pipeline_communicate
from picotron.pipeline_parallel.stages import Stage
from picotron.process_group_manager import new_groups

Shapes = Sequence[int] | Sequence[Sequence[int]]
"""the shape of the hidden states between stages: one for all micro-batches of a step, or one for each"""


class Model(Protocol):
    """What a step needs of its model, a `PipelineParallel` in a `DataParallel`."""

    require_backward_grad_sync: bool

    def __call__(self, **batch: Any) -> Tensor: ...
    def backward(self, x: Tensor | None, y: Any, dy: Tensor | None, /) -> Tensor | None: ...


class Loader(Protocol):
    """What a step needs of its data loader: this rank's next micro-batches, and their number in a step."""

    grad_acc_steps: int

    def __next__(self) -> dict[str, Any]: ...


Step = Callable[[Any, Any], Tensor]
"""A training step or an evaluation: a function of a `Model` and a `Loader`. It returns the mean loss over this rank's
tokens, which is 0 on all stages except the last."""


def train_step(model: Model, data_loader: Loader, device: torch.device) -> Tensor:
    """Run forward and backward for this rank's micro-batches of one global batch. The gradients are complete after
    `finish_grad_sync`, which clipping and the optimizer call.

    Returns:
        The mean loss over this rank's tokens: a scalar that stays on the device.
    """
    total_loss = torch.zeros((), device=device)
    for i in range(data_loader.grad_acc_steps):
        # Gradients accumulate over the micro-batches. Only the last backward averages them over the ranks.
        model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1
        loss = model(**next(data_loader)) / data_loader.grad_acc_steps
        loss.backward()
        total_loss = total_loss + loss.detach()
        del loss  # frees its graph, whose small objects would split the memory that the next forward needs
    return total_loss


class PipelineParallel(nn.Module):
    """This rank's part of a Llama: layers, the embedding on the first stage, the final norm and head on the last.

    If the embedding's matrix is also the head's (tied) but they are on different ranks, each rank holds a replica. Each
    replica gets the gradient of its own use, and `Placement.sum_over` says that these are added. The replicas start
    equal and get equal updates, so they stay identical to the last bit.

    Args:
        model: a Llama on the meta device, from which the modules of other ranks are removed.
        stage: the layers that this rank keeps, and whether it has the embedding and the head.
        last_rank: the pp rank that holds the head, by default the last one.

    Attributes:
        splits_backward: whether weight gradients are computed apart from the other ones.
    """

    splits_backward = False

    def __init__(self, model: Llama, stage: Stage, last_rank: int | None = None) -> None:
        super().__init__()
        self.module = model
        grid = pgm.process_group_manager
        last_rank = grid.pp_world_size - 1 if last_rank is None else last_rank
        has_replica = model.config.tie_word_embeddings and last_rank != 0  # the embedding is always on pp rank 0

        untyped: Any = model  # its class declares modules that may be None from here on
        for i in set(range(model.config.num_hidden_layers)) - set(stage.layers):
            del untyped.model.layers[str(i)]
        if not stage.has_head:
            untyped.model.norm = untyped.lm_head = None
        ends = grid.grid.movedim(1, -1)[..., [0, last_rank]]  # (dp, cp, tp, 2), the ends of each pipeline
        both = new_groups(ends.reshape(-1, 2).tolist()) if has_replica else None
        if has_replica and (stage.has_embedding or stage.has_head):  # the last stage keeps it as the head's weight
            place(untyped.model.embed_tokens.weight, is_tied=True, is_replica=not stage.has_embedding, sum_over=both)
        elif not stage.has_embedding:
            untyped.model.embed_tokens = None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, hidden_states: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Run the stage. The first one reads input_ids (B, T/cp), the others hidden_states (B, T/cp, D), or a shard of
        them, (B, T/cp/tp, D), with sequence parallelism.

        Args:
            others: see `Llama.forward`.

        Returns:
            Hidden states for the next stage. On the last stage, the loss, or the logits if there are no targets.
        """
        return self.module(input_ids, position_ids, hidden_states, **others)

    def backward(
        self, input_tensor: Tensor | None, output_tensor: Tensor | GradientEdge, output_tensor_grad: Tensor | None
    ) -> Tensor | None:
        """Add one micro-batch's gradients to those of the parameters.

        Args:
            input_tensor: the `hidden_states` of its forward; None on the first stage.
            output_tensor: the result of its forward, or the edge of this in the graph, which needs no memory.
            output_tensor_grad: gradient of the output, from the next stage; None on the last stage, whose output is a
                scalar, the loss.

        Returns:
            Gradient of the input, for the previous stage; None on the first stage.
        """
        if isinstance(output_tensor, GradientEdge) or output_tensor.requires_grad:  # not so if a first stage is frozen
            torch.autograd.backward(output_tensor, output_tensor_grad)
        if input_tensor is None:
            return None
        # The received tensor is a leaf of the graph, see `pipeline_communicate`, so its gradient is there.
        return torch.zeros_like(input_tensor) if input_tensor.grad is None else input_tensor.grad


def forward_step(
    model: Callable[..., Tensor], data_loader: Loader, input_tensor: Tensor | None, losses: list[Tensor]
) -> Tensor:
    """Run forward of the next micro-batch. Every stage loads it: all need its position_ids, the last one its targets.

    Returns:
        The stage's output. On the last stage, it is the mean loss divided by the number of micro-batches, so that the
        gradients add up to those of the mean over all micro-batches; it is also appended to `losses`.
    """
    output_tensor = model(**next(data_loader) | {"hidden_states": input_tensor})
    if pgm.process_group_manager.pp_is_last_stage:
        output_tensor = output_tensor / data_loader.grad_acc_steps
        losses.append(output_tensor.detach())
    return output_tensor


def graph_of(y: Tensor) -> Tensor | GradientEdge:
    """Return what backward needs of an output: its edge in the graph, so that its memory is free once it is sent.
    (Megatron-LM's `deallocate_pipeline_outputs` frees as much.) A loss, of one number, stays.
    """
    return get_gradient_edge(y) if y.requires_grad and y.ndim else y


def shapes_of(tensor_shapes: Shapes, micro_batches: int) -> Any:
    """Return a shape for each micro-batch."""
    return [tensor_shapes] * micro_batches if isinstance(tensor_shapes[0], int) else tensor_shapes


def sum_losses(losses: list[Tensor], device: torch.device) -> Tensor:
    """Sum the losses without waiting for the device. Returns 0 if there are none, as on all stages except the last;
    this 0 is in float32, whatever the dtype of the last stage's losses.
    """
    return torch.stack(losses).sum() if losses else torch.zeros((), device=device)


def train_step_pipeline_afab(
    model: Model, data_loader: Loader, tensor_shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Run all forwards, then all backwards: GPipe (Huang et al. 2018, arXiv:1811.06965).

    `LinearCrossEntropy` computes the gradient of the head's weight in forward, so the last stage keeps one per
    micro-batch.

    x and y are a micro-batch's input and output of this stage, dx and dy their gradients.

    Args:
        model: a `PipelineParallel` in a `DataParallel`.
        data_loader: the micro-batches of this rank's pipeline.
        tensor_shapes, device, dtype: describe the hidden states between stages.

    Returns:
        On the last stage, the mean loss over this pipeline's tokens, on the others 0; a scalar on the device.
    """
    micro_batches = data_loader.grad_acc_steps
    shapes = shapes_of(tensor_shapes, micro_batches)
    losses: list[Tensor] = []
    activations: deque[tuple[Tensor | None, Any]] = deque()  # x, and the graph of y, before the backward

    for i in range(micro_batches):
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shapes[i])
        y = forward_step(model, data_loader, x, losses)
        pipeline_communicate("send_forward", device, dtype, y)
        activations.append((x, graph_of(y)))
        del y  # backward needs only its graph

    for i in range(micro_batches):
        # Gradients accumulate, and only the last backward averages them over the data-parallel ranks: a hook of
        # `DataParallel` reads the flag. Meanwhile, the previous stages, which receive dx later, are still computing.
        model.require_backward_grad_sync = i == micro_batches - 1
        dy = pipeline_communicate("recv_backward", device, dtype, shapes=shapes[i])
        dx = model.backward(*activations.popleft(), dy)
        pipeline_communicate("send_backward", device, dtype, dx)

    return sum_losses(losses, device)


def train_step_pipeline_1f1b(
    model: Model, data_loader: Loader, tensor_shapes: Shapes, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Alternate forward and backward: PipeDream-Flush (Narayanan et al. 2020, arXiv:2006.09503).

    Arguments and result are those of `train_step_pipeline_afab`.
    """
    grid, micro_batches = pgm.process_group_manager, data_loader.grad_acc_steps
    shapes = shapes_of(tensor_shapes, micro_batches)
    losses: list[Tensor] = []
    activations: deque[tuple[Tensor | None, Any]] = deque()  # x, and the graph of y, before the backward
    warmup = min(grid.pp_world_size - grid.pp_rank - 1, micro_batches)

    for i in range(warmup):  # forwards only, until the first gradient can arrive
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shapes[i])
        y = forward_step(model, data_loader, x, losses)
        pipeline_communicate("send_forward", device, dtype, y)
        activations.append((x, graph_of(y)))
        del y

    if warmup < micro_batches:
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shapes[warmup])
    for oldest in range(micro_batches - warmup):  # steady state: forward of the newest, then backward of the oldest
        newest = warmup + oldest
        y = forward_step(model, data_loader, x, losses)
        dy = bidirectional_pipeline_communicate("send_fwd_recv_bwd", y, shapes[oldest], device, dtype)
        activations.append((x, graph_of(y)))
        del y
        model.require_backward_grad_sync = oldest == micro_batches - 1  # so only on the last stage, without warm-up
        dx = model.backward(*activations.popleft(), dy)
        if newest < micro_batches - 1:
            x = bidirectional_pipeline_communicate("send_bwd_recv_fwd", dx, shapes[newest + 1], device, dtype)
        else:
            pipeline_communicate("send_backward", device, dtype, dx)
        del dy, dx  # frees their memory before the next forward

    for i in range(micro_batches - warmup, micro_batches):  # cool-down: the remaining backwards
        model.require_backward_grad_sync = i == micro_batches - 1  # the stage's last backward, as in AFAB
        dy = pipeline_communicate("recv_backward", device, dtype, shapes=shapes[i])
        dx = model.backward(*activations.popleft(), dy)
        pipeline_communicate("send_backward", device, dtype, dx)

    return sum_losses(losses, device)


@torch.no_grad()
def evaluate_pipeline(
    model: Callable[..., Tensor],
    data_loader: Loader,
    tensor_shapes: Shapes,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Run the forwards only, also without a pipeline. Returns the mean loss as AFAB does."""
    shapes, losses = shapes_of(tensor_shapes, data_loader.grad_acc_steps), list[Tensor]()
    for shape in shapes:
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shape)
        y = forward_step(model, data_loader, x, losses)
        pipeline_communicate("send_forward", device, dtype, y)
    return sum_losses(losses, device)
