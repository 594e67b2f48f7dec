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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.model.llama import Llama
from picotron.model.split_backward import split_backward
from picotron.model.weights import main_grad, mark_tied
from picotron.pipeline_parallel.modules import Graph, PipelineStages, graph_of, tensors
from picotron.pipeline_parallel.plan import PipelinePlan
from picotron.pipeline_parallel.pp_communications import bidirectional_pipeline_communicate, pipeline_communicate
from picotron.pipeline_parallel.recorder import record_action
from picotron.process_group_manager import new_groups


class PipelineParallel(PipelineStages):
    """This rank's stages of a Llama: layers, the embedding on the first stage, the final norm and head on the last.

    If the embedding's matrix is also the head's (tied) but they are on different ranks, each rank holds a replica. Each
    replica gets the gradient of its own use, and `sum_tied_gradients` adds them. The replicas start equal and get equal
    updates, so they stay identical to the last bit.

    Args:
        model: a Llama on the meta device, from which the modules of other ranks are removed.
        plan: the stages of the pipeline, and their ranks.
        sequence_parallel: whether hidden states are sharded over the tp ranks along the sequence.

    Attributes:
        stages: contents of this rank's stages, by number. With one stage per rank, its number is the pp rank.
        kept_activations: (stage, micro-batch) of the forwards whose activations are not recomputed in backward.
    """

    def __init__(self, model: Llama, plan: PipelinePlan, sequence_parallel: bool = False) -> None:
        super().__init__()
        grid = pgm.process_group_manager
        self.module, self.plan = model, plan
        self.stages = plan.stages_of(grid.pp_rank)
        self.kept_activations = plan.kept_activations(grid.pp_rank)
        has_embedding = any(stage.has_embedding for stage in self.stages.values())
        has_head = any(stage.has_head for stage in self.stages.values())
        has_replica = model.config.tie_word_embeddings and plan.last_rank != 0  # the first stage is always on pp rank 0

        untyped: Any = model  # its class declares modules that may be None from here on
        layers = {i for stage in self.stages.values() for i in stage.layers}
        for i in set(range(model.config.num_hidden_layers)) - layers:
            del untyped.model.layers[str(i)]
        if not has_head:
            untyped.model.norm = untyped.lm_head = None
        if has_replica and (has_embedding or has_head):
            mark_tied(untyped.model.embed_tokens, "weight", is_replica=not has_embedding)
        elif not has_embedding:
            untyped.model.embed_tokens = None
        ends = grid.grid.movedim(1, -1)[..., [0, plan.last_rank]]  # (dp, cp, tp, 2), the ends of each pipeline
        self.embedding_group = new_groups(ends.reshape(-1, 2).tolist()) if has_replica else None
        self.dtype, self.shards = next(model.parameters()).dtype, grid.tp_world_size if sequence_parallel else 1
        if plan.schedule.splits_backward:
            split_backward(model)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor | None,
        cu_seqlens: Tensor | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        **loss: Any,
    ) -> Tensor:
        """Run a stage. The first one reads input_ids (B, T/cp), the others hidden_states, see `receives`.

        Args:
            cu_seqlens, loss: boundaries of documents, and arguments of the loss, see `Llama.forward`.
            stage, micro_batch: numbers of the stage (by default this rank's first one) and of the micro-batch.

        Returns:
            Hidden states for the next stage. On the last stage, the loss or the logits.
        """
        stage = min(self.stages) if stage is None else stage
        contents, keep = self.stages[stage], (stage, micro_batch) in self.kept_activations
        x = self.module.embed(input_ids) if contents.has_embedding else hidden_states
        assert x is not None
        y = self.module.run_layers(x, position_ids, contents.layers, cu_seqlens, keep)
        if contents.has_head:
            return self.module.logits_or_loss(y, **loss)
        return y

    def receives(self, stage: int, batch: dict[str, Any]) -> Tensor:
        """Return a tensor on the meta device like the hidden states of a micro-batch: (B, T/cp, D), or (B, T/cp/tp, D)
        with sequence parallelism.
        """
        B, T = batch["position_ids"].shape
        shape = B, T // self.shards, self.module.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def parameters_of(self, number: int) -> list[nn.Parameter]:
        stage, decoder = self.stages[number], self.module.model
        modules: list[nn.Module] = [decoder.embed_tokens] if stage.has_embedding else []
        modules += [decoder.layers[str(i)] for i in stage.layers]
        modules += [decoder.norm, self.module.lm_head] if stage.has_head else []
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))

    def sum_tied_gradients(self) -> None:
        """Add the two gradients of the tied matrix: one of its use as embedding, one of its use as head."""
        if self.embedding_group is not None and (weight := self.module.model.embed_tokens.weight).requires_grad:
            all_reduce(main_grad(weight), self.embedding_group)


def forward_step(model: Any, data_loader: Any, input_tensor: Tensor | None, i: int, losses: list[Tensor]) -> Tensor:
    """Run forward of micro-batch i. Every stage loads it, for its position_ids.

    Returns:
        The stage's output. On the last stage, it is the mean loss divided by the number of micro-batches, so that the
        gradients add up to those of the mean over all micro-batches; it is also appended to `losses`.
    """
    batch = next(data_loader) | {"hidden_states": input_tensor}
    with record_action(f"F{i}"):
        output_tensor = model(**batch, micro_batch=i)
        if pgm.process_group_manager.pp_is_last_stage:
            output_tensor = output_tensor / data_loader.grad_acc_steps
            losses.append(output_tensor.detach())
    return output_tensor


def backward_step(
    model: Any, input_tensor: Tensor | None, graph: Graph, output_tensor_grad: Tensor | None, i: int
) -> Tensor | None:
    """Run backward of micro-batch i, named Bi, see `PipelineStages.backward`."""
    with record_action(f"B{i}"):
        dx = model.module.backward(tensors(input_tensor), graph, (output_tensor_grad,))
    return dx[0] if dx else None


def shapes_of(tensor_shapes: Sequence[Any], micro_batches: int) -> Sequence[Sequence[int]]:
    """Return a shape for each micro-batch, given one shape for all of them or a list of shapes."""
    return [tensor_shapes] * micro_batches if isinstance(tensor_shapes[0], int) else tensor_shapes


def finish_step(model: Any, losses: list[Tensor], device: torch.device) -> Tensor:
    """Complete a step's gradients: average over dp and cp ranks, and add the tied ones. Returns the step's loss."""
    model.finish_grad_sync()
    model.module.sum_tied_gradients()
    return sum_losses(losses, device)


def sum_losses(losses: list[Tensor], device: torch.device) -> Tensor:
    """Sum the losses without waiting for the device. Returns 0 if there are none, as on all stages except the last; it
    is in float32, whatever the dtype of the losses.
    """
    return torch.stack(losses).sum() if losses else torch.zeros((), device=device)


def train_step_pipeline_afab(
    model: Any, data_loader: Any, tensor_shapes: Sequence[Any], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Run all forwards, then all backwards: GPipe (Huang et al. 2018, arXiv:1811.06965).

    The loss computes the gradient of the head in forward, so the last stage keeps one such gradient per micro-batch.

    x and y are a micro-batch's input and output of this stage, dx and dy their gradients.

    Args:
        model: a `PipelineParallel` in a `DataParallel`.
        data_loader: the micro-batches of this rank's pipeline.
        tensor_shapes, device, dtype: describe the hidden states between stages; one shape, or one for each micro-batch.

    Returns:
        On the last stage, the mean loss over this pipeline's tokens, on the others 0; a scalar on the device.
    """
    micro_batches = data_loader.grad_acc_steps
    shapes = shapes_of(tensor_shapes, micro_batches)
    losses: list[Tensor] = []
    activations: deque[tuple[Tensor | None, Graph]] = deque()  # x, and the graph of y, before the backward

    for i in range(micro_batches):
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shapes[i])
        y = forward_step(model, data_loader, x, i, losses)
        pipeline_communicate("send_forward", device, dtype, y, shapes[i])
        activations.append((x, graph_of(y)))
        del y  # backward needs only its graph

    for i in range(micro_batches):
        # Gradients accumulate, and only the last backward averages them over the data-parallel ranks. Meanwhile, the
        # previous stages, which receive dx later, are still computing.
        model.require_backward_grad_sync = i == micro_batches - 1
        dy = pipeline_communicate("recv_backward", device, dtype, shapes=shapes[i])
        dx = backward_step(model, *activations.popleft(), dy, i)
        pipeline_communicate("send_backward", device, dtype, dx, shapes[i])

    return finish_step(model, losses, device)


def train_step_pipeline_1f1b(
    model: Any, data_loader: Any, tensor_shapes: Sequence[Any], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Alternate forward and backward: PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473). Else like AFAB."""
    grid, micro_batches = pgm.process_group_manager, data_loader.grad_acc_steps
    shapes = shapes_of(tensor_shapes, micro_batches)
    losses: list[Tensor] = []
    activations: deque[tuple[Tensor | None, Graph]] = deque()  # x, and the graph of y, before the backward
    warmup = min(grid.pp_world_size - grid.pp_rank - 1, micro_batches)

    for i in range(warmup):  # forwards only, until the first gradient can arrive
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shapes[i])
        y = forward_step(model, data_loader, x, i, losses)
        pipeline_communicate("send_forward", device, dtype, y, shapes[i])
        activations.append((x, graph_of(y)))
        del y

    if warmup < micro_batches:
        x = pipeline_communicate("recv_forward", device, dtype, shapes=shapes[warmup])
    for i in range(micro_batches - warmup):  # steady state: forward of the newest, then backward of the oldest
        new = warmup + i
        y = forward_step(model, data_loader, x, new, losses)
        dy = bidirectional_pipeline_communicate("send_fwd_recv_bwd", y, shapes[i], device, dtype, shapes[new])
        activations.append((x, graph_of(y)))
        del y
        model.require_backward_grad_sync = i == micro_batches - 1  # only on the last stage, which has no cool-down
        dx = backward_step(model, *activations.popleft(), dy, i)
        if new < micro_batches - 1:
            x = bidirectional_pipeline_communicate("send_bwd_recv_fwd", dx, shapes[new + 1], device, dtype, shapes[i])
        else:
            pipeline_communicate("send_backward", device, dtype, dx, shapes[i])
        del dy, dx  # frees their memory before the next forward

    for i in range(micro_batches - warmup, micro_batches):  # cool-down: the remaining backwards
        model.require_backward_grad_sync = i == micro_batches - 1  # the stage's last backward, as in AFAB
        dy = pipeline_communicate("recv_backward", device, dtype, shapes=shapes[i])
        dx = backward_step(model, *activations.popleft(), dy, i)
        pipeline_communicate("send_backward", device, dtype, dx, shapes[i])

    return finish_step(model, losses, device)
