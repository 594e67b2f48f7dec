"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): every matrix is split over the tp ranks.

A block (attention or MLP) is a column-parallel matrix, of which each rank computes some of the outputs (its heads, or
its hidden units), an operation that treats these outputs independently, and a row-parallel matrix, which each rank
multiplies with the inputs that it holds. The products are partial: their sum over the ranks is the output. So a block
needs one collective in forward and one in backward.

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198), the tensors between the blocks (for norms and
residuals) are also sharded, along the sequence. The sum becomes a reduce-scatter, and the next block begins with an
all-gather: together, they send as many bytes as one all-reduce. For an MLP, without it (left) and with it (right):

        x (B, T, D), full                     x (B, T/tp, D), sharded
             | copy                                | all-gather
      column-parallel                       column-parallel
             | h (B, T, F/tp), sharded             | h (B, T, F/tp), sharded
       row-parallel                          row-parallel
             | all-reduce                          | reduce-scatter
        y (B, T, D), full                     y (B, T/tp, D), sharded
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype
from picotron.console import UserError
from picotron.model.cross_entropy import VocabularyShard
from picotron.model.families import differences, head_size
from picotron.model.llama import Head, Linear, Llama, Projections, RMSNorm
from picotron.model.placement import Shard, is_placed, place
from picotron.process_group_manager import new_groups
from picotron.tensor_parallel.tp_communications import (
    enter,
    gather_from_ranks,
    leave,
    mean_over_ranks,
    start_all_gather,
    start_sum,
)


def gradient_of_input(dys: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Compute the sum of dy W over linear layers that share their input, from matrices dy (tokens, outputs)."""
    dx = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        dx.addmm_(dy, weight)
    return dx


class ColumnParallel(torch.autograd.Function):
    """forward: y = x W' for several W (outputs/tp, D) that share x, so that x is gathered only once.
    backward: dx = dy W, summed over these W and over the ranks, and meanwhile dW = dy' x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, *weights)  # x may be a shard, (B, T/tp, D): backward gathers it again
        full_x = start_all_gather(x, group)() if sequence_parallel else x  # (B, T, D)
        return tuple(F.linear(full_x, weight) for weight in weights)  # (B, T, outputs/tp) each

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        trained = ctx.needs_input_grad[3:]  # False for frozen weights
        finish_x = start_all_gather(x, ctx.group) if ctx.sequence_parallel and any(trained) else lambda: x
        dys = [gradient.flatten(0, 1) for gradient in gradients]  # (B * T, outputs/tp)
        dx = gradient_of_input(dys, weights).view(*gradients[0].shape[:2], -1)  # (B, T, D), partial
        finish_dx = start_sum(dx, ctx.group, ctx.sequence_parallel)
        inputs = finish_x().flatten(0, 1)  # (B * T, D); the sum of dx is on its way
        dweights = [dy.t() @ inputs if needed else None for dy, needed in zip(dys, trained, strict=True)]
        return finish_dx(), None, None, *dweights


class ParallelProjections(Projections):
    """`Projections` with column-parallel layers, of which each rank computes some of the outputs: x (B, T, D), or its
    shard (B, T/tp, D) with sequence parallelism -> (B, T, outputs/tp) each.
    """

    function: Any = ColumnParallel  # of a schedule that defers weight gradients, another one

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = pgm.process_group_manager.tp_group, sequence_parallel

    @torch.compiler.disable  # torch.compile cannot overlap these collectives, and products gain nothing from it
    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        ys = self.function.apply(x, self.group, self.sequence_parallel, *(linear.weight for linear in linears))
        return [y if linear.bias is None else y + linear.bias for y, linear in zip(ys, linears, strict=True)]


def placed(values: Tensor, shard: Shard | None, sum_over: dist.ProcessGroup | None = None) -> nn.Parameter:
    """Return a parameter with a `Placement`."""
    parameter = nn.Parameter(values)
    place(parameter, shard=shard, sum_over=sum_over)
    return parameter


def column_parallel(linear: nn.Linear, shard: Shard, sum_over: dist.ProcessGroup | None = None) -> Linear:
    """Return this rank's part of a linear layer on the meta device, some of the outputs.

    Args:
        shard: this rank's rows of the weight, and elements of the bias.
        sum_over: the ranks that hold the same rows, and use them for different query heads, see `Placement`.
    """
    weight = linear.weight
    part = Linear(linear.in_features, shard.size, linear.bias is not None, weight.device, weight.dtype)
    for parameter in part.parameters():
        place(parameter, shard=shard, sum_over=sum_over)
    return part


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank holds some of the inputs: x (B, T, inputs/tp) -> y (B, T, D), or its shard
    (B, T/tp, D) with sequence parallelism.
    """

    product: Callable[..., Tensor] = staticmethod(F.linear)  # as in `Linear`

    def __init__(self, linear: nn.Linear, shard: Shard, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = pgm.process_group_manager.tp_group, sequence_parallel
        self.weight = placed(linear.weight.new_empty(linear.out_features, shard.size), shard)
        sum_over = self.group if sequence_parallel else None  # each rank adds the bias to its own tokens
        self.bias = None if linear.bias is None else placed(linear.bias.new_empty(linear.out_features), None, sum_over)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight)  # (B, T, D), partial, so the bias is added after the sum
        y = leave(y, self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


class NormOverRanks(nn.Module):
    """An `RMSNorm` over all heads, of which each rank holds some: x (B, T, heads * d).

    The mean of the squares is the mean of the ranks' means, because all ranks hold the same number of heads. Several
    ranks that hold the same head change nothing, because then each head is held equally often.
    """

    def __init__(self, norm: RMSNorm, shard: Shard, sum_over: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, self.eps = pgm.process_group_manager.tp_group, norm.eps
        self.weight = placed(norm.weight.new_empty(shard.size), shard, sum_over)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x))
        mean = mean_over_ranks(wide.square().mean(-1, keepdim=True), self.group)  # (B, T, 1)
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of some tokens, (V/tp, D): input_ids (B, T) -> y (B, T, D), or its
    shard (B, T/tp, D) with sequence parallelism.
    """

    def __init__(self, embedding: nn.Embedding, shard: Shard, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = pgm.process_group_manager.tp_group, sequence_parallel
        self.weight = placed(embedding.weight.new_empty(shard.size, embedding.embedding_dim), shard)
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        is_local = shard.start <= padding < shard.stop
        self.padding_idx = padding - shard.start if is_local else None  # this row gets no gradient
        self.start, self.stop = shard.start, shard.stop

    def forward(self, input_ids: Tensor) -> Tensor:
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        y = F.embedding((input_ids - self.start).masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        y = y.masked_fill(elsewhere[..., None], 0.0)  # (B, T, D), partial: one rank has the row, the others have zeros
        return leave(y, self.group, self.sequence_parallel)


class VocabParallelHead(Head):
    """A head of which each rank computes some of the logits, (B, T, V/tp). Calling the module gathers them, (B, T, V):
    inference needs that, losses do not. Its inputs x are (B, T, D), or their shards (B, T/tp, D) with sequence
    parallelism.
    """

    def __init__(self, head: Head, shard: Shard, sequence_parallel: bool) -> None:
        super().__init__(head.in_features, shard.size, device=head.weight.device, dtype=head.weight.dtype)
        place(self.weight, shard=shard)
        self.vocab_size, self.sequence_parallel = head.out_features, sequence_parallel
        rows = shard.stop - shard.start  # without the padding
        self.vocabulary = VocabularyShard(shard.start, rows, pgm.process_group_manager.tp_group)

    def enter(self, x: Tensor) -> Tensor:
        """Return the full x, whose gradient is summed over the tp ranks."""
        return enter(x, self.vocabulary.group, self.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.linear(self.enter(x), self.weight)
        return gather_from_ranks(padded, self.vocabulary.group, 2)[..., : self.vocab_size]


def check_tensor_parallel(config: PreTrainedConfig, tp_size: int) -> None:
    """Raise UserError if the model cannot be split over tp_size ranks."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def fits(tp: int) -> bool:
        return heads % tp == 0 and config.intermediate_size % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)

    if not fits(tp_size):
        raise UserError(
            f"tp_size={tp_size} does not split num_attention_heads={heads}, num_key_value_heads={kv_heads} and "
            f"intermediate_size={config.intermediate_size}; use one of {[tp for tp in range(1, heads + 1) if fits(tp)]}"
        )


def _even_shard(full_size: int) -> Shard:
    """Return this rank's shard of `full_size` rows. If tp does not divide them, the last ranks' shards are padded."""
    grid = pgm.process_group_manager
    size = -(-full_size // grid.tp_world_size)
    start = min(grid.tp_rank * size, full_size)
    return Shard(dim=0, full_size=full_size, start=start, stop=min(start + size, full_size), size=size)


def _kv_shard(kv_heads: int, head_dim: int) -> Shard:
    """Return this rank's shard of the key/value heads. If tp is larger than K, consecutive ranks hold the same head."""
    grid = pgm.process_group_manager
    size, replicas = max(1, kv_heads // grid.tp_world_size) * head_dim, max(1, grid.tp_world_size // kv_heads)
    start = grid.tp_rank // replicas * size
    return Shard(dim=0, full_size=kv_heads * head_dim, start=start, stop=start + size, size=size, replicas=replicas)


def apply_tensor_parallel(model: Llama, sequence_parallel: bool = False) -> Llama:
    """Replace the layers of a Llama on the meta device by layers that hold this tp rank's shards.

    Args:
        sequence_parallel: whether to shard norms and residuals along the sequence; tp must divide T.

    Raises:
        UserError: see `check_tensor_parallel`.
    """
    config, tp = model.config, pgm.process_group_manager.tp_world_size
    check_tensor_parallel(config, tp)
    if tp == 1:
        return model

    queries = _even_shard(config.num_attention_heads * head_size(config))
    kv = _kv_shard(config.num_key_value_heads, head_size(config))
    hidden = _even_shard(config.intermediate_size)
    # In the grid, tp is the last axis, so the ranks that hold the same key/value head are consecutive.
    grid = pgm.process_group_manager.grid
    kv_replicas = new_groups(grid.view(-1, kv.replicas).tolist()) if kv.replicas > 1 else None
    vocabulary = _even_shard(config.vocab_size)
    untyped: Any = model  # the new layers' classes are not those that `Llama` declares
    untyped.lm_head = VocabParallelHead(model.lm_head, vocabulary, sequence_parallel)
    decoder = untyped.model
    decoder.embed_tokens = VocabParallelEmbedding(decoder.embed_tokens, vocabulary, sequence_parallel)
    for layer in decoder.layers.values():
        attention, mlp = layer.self_attn, layer.mlp
        attention.project, mlp.project = ParallelProjections(sequence_parallel), ParallelProjections(sequence_parallel)
        attention.q_proj = column_parallel(attention.q_proj, queries)
        attention.k_proj = column_parallel(attention.k_proj, kv, kv_replicas)
        attention.v_proj = column_parallel(attention.v_proj, kv, kv_replicas)
        attention.o_proj = RowParallelLinear(attention.o_proj, dataclasses.replace(queries, dim=1), sequence_parallel)
        mlp.gate_proj = column_parallel(mlp.gate_proj, hidden)
        mlp.up_proj = column_parallel(mlp.up_proj, hidden)
        mlp.down_proj = RowParallelLinear(mlp.down_proj, dataclasses.replace(hidden, dim=1), sequence_parallel)
        if differences(config).qk_norm == "all heads":
            attention.q_norm = NormOverRanks(attention.q_norm, queries)
            attention.k_norm = NormOverRanks(attention.k_norm, kv, kv_replicas)
    # The other parameters, such as norms, are whole on each rank. Inside of a block, the ranks apply them to different
    # heads, and with sequence parallelism everywhere to different tokens: each rank has a part of the gradient.
    for name, parameter in model.named_parameters():
        in_block = ".self_attn." in name or ".mlp." in name
        if not is_placed(parameter) and (in_block or sequence_parallel):
            place(parameter, sum_over=pgm.process_group_manager.tp_group)
    model.tie_weights()
    return model
