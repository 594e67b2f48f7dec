"""Attention kernels: those that torch chooses, within documents, and the blocks of context parallelism."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.errors import LIMITS, draw, errors, name_of
from benchmarks.gpu.report import Check, Options
from picotron import process_group_manager as pgm
from picotron.context_parallel.block_attention import accumulate_gradients, blockwise_attention
from picotron.context_parallel.positions import local_positions, visible_blocks
from picotron.model.llama import fused_attention, math_attention
from picotron.model.packed import PackedDocuments, attend_per_document

CP_RANKS = 4
HEADS = 8


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by its definition."""
    k, v = (each.repeat_interleave(q.size(1) // k.size(1), dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(3))
    future = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def as_in_the_model(x: Tensor) -> Tensor:
    """Copy x (B, H, T, d) into memory ordered as (B, T, H, d), which is how projections and `o_proj` leave it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class AttentionOfAllRanks(torch.autograd.Function):
    """forward and backward: those of `RingAttention` on all cp ranks, one after the other, on one process."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sharding: str) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        shards = [(rank, torch.stack((k, v))[:, :, :, keys]) for rank, keys in each_rank(q, sharding)]
        for _, own in each_rank(q, sharding):
            queries = as_in_the_model(q[:, :, own])
            blocks_of = functools.partial(visible_blocks, sharding=sharding)
            out[:, :, own], lse[:, :, own] = blockwise_attention(queries, shards, blocks_of)
        ctx.sharding = sharding
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), lse.new_zeros(2, *k.shape)
        shards = [(rank, keys) for rank, keys in each_rank(q, ctx.sharding)]
        for _, own in each_rank(q, ctx.sharding):
            own_dy, own_q, own_out = (as_in_the_model(each[:, :, own]) for each in (dy, q, out))
            own_dq = torch.zeros_like(own_q, dtype=lse.dtype)
            for source, keys in shards:
                kv = torch.stack((k, v))[:, :, :, keys]
                block_dkv = torch.zeros_like(kv, dtype=lse.dtype)
                blocks = visible_blocks(source, len(own), ctx.sharding)
                accumulate_gradients(own_dy, own_q, kv, blocks, own_out, lse[:, :, own], own_dq, block_dkv)
                dkv[:, :, :, keys] += block_dkv
            dq[:, :, own] = own_dq
        return dq.to(q.dtype), *dkv.to(k.dtype), None


def each_rank(q: Tensor, sharding: str) -> Iterator[tuple[int, Tensor]]:
    """Become one cp rank after the other, and yield it and the positions of its tokens."""
    for rank in range(CP_RANKS):
        grid = types.SimpleNamespace(cp_rank=rank, cp_world_size=CP_RANKS)
        with mock.patch.object(pgm, "process_group_manager", grid):
            yield rank, local_positions(q.size(2), CP_RANKS, rank, sharding).to(q.device)


def within_documents(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call an attention function with four documents in the two rows of q, k and v."""
    tokens = q.size(2)
    ends = torch.tensor([0, tokens // 3, tokens, tokens + 5, 2 * tokens], dtype=torch.int32)
    return function(q, k, v, PackedDocuments.of(ends, q.device))


def exact_packed_attention(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments) -> Tensor:
    return attend_per_document(q, k, v, documents, lambda q, k, v, _: exact_attention(q, k, v))


def attention_errors(
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *sizes: int,
) -> list[float]:
    kv_heads, head_dim, tokens = sizes
    queries, keys = (2, HEADS, tokens, head_dim), (2, kv_heads, tokens, head_dim)
    dy, q, k, v = (as_in_the_model(draw(device, dtype, *shape)) for shape in (queries, queries, keys, keys))
    return errors(ours, torchs, exact, dy, q, k, v)


def attention_checks(options: Options) -> Iterator[Check]:
    blockwise = {
        f"attention to blocks, cp {CP_RANKS}, {sharding}": (
            functools.partial(lambda *qkv, sharding: AttentionOfAllRanks.apply(*qkv, sharding), sharding=sharding),
            fused_attention,
            exact_attention,
        )
        for sharding in ("zigzag", "contiguous")
    }
    single = {"`fused_attention`": (fused_attention, math_attention, exact_attention)}
    packed = {
        "`fused_attention` within documents": tuple(
            functools.partial(within_documents, function)
            for function in (fused_attention, math_attention, exact_packed_attention)
        )
    }
    dtypes = [torch.bfloat16, torch.float32] + [torch.float64] * (not options.on_gpu)  # no kernel on GPUs
    sizes = ((64, 1000), (128, 1000)) if options.on_gpu else ((16, 24),)  # 1000 is no multiple of a kernel's blocks
    for dtype, kv_heads, (head_dim, tokens) in itertools.product(dtypes, (HEADS, HEADS // 4), sizes):
        for name, functions in {**single, **packed, **blockwise}.items():
            yield Check(
                [name, name_of(dtype), f"{HEADS} / {kv_heads} heads of {head_dim}, {tokens} tokens"],
                functools.partial(attention_errors, *functions, options.device, dtype, kv_heads, head_dim, tokens),
                LIMITS[dtype],
            )
