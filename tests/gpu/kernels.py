"""Kernels and hand-written backwards, compared with plain formulas in float64, and torch's own kernels beside them."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from picotron import process_group_manager as pgm
from picotron.config import Training
from picotron.context_parallel.context_parallel import accumulate_gradients, blockwise_attention
from picotron.context_parallel.packed_blocks import packed_blocks
from picotron.context_parallel.positions import local_positions
from picotron.model import RMSNorm, fused_attention, math_attention, rope
from picotron.optimizer import AdamW
from picotron.process_group_manager import setup_process_group_manager
from picotron.split_backward import defer_weight_grads, run_deferred, split_backward
from picotron.tensor_parallel.cross_entropy import VocabularyShard, linear_cross_entropy
from picotron.weights import set_main_grad
from tests.gpu.report import Check, Lines, Options, checked, header
from tests.support.oracle import our_model, relative_error, tiny_llama
from tests.support.shapes import LLAMA3_ROPE

# Rounding to bfloat16 is an error of up to 2^-9 = 2e-3, and a backward rounds several times. In float32, rounding is an
# error of up to 6e-8, and kernels may split the numbers into several TF32 numbers. A wrong mask, scale or sum is an
# error of 0.1 to 1. (Rotary angles of thousands of radians, in float32, get the limit of bfloat16.)
LIMITS = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}
CP_RANKS = 4
HEADS = 8


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw normal numbers, which differ from call to call and not from run to run."""
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def with_gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the function's result, and the gradients of all inputs for the gradient dy of the result."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = function(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def largest_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))


def errors(
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    dy: Tensor,
    *inputs: Tensor,
) -> list[float]:
    """Return the largest relative errors, of the result and all gradients, of our function and of torch's."""
    expected = with_gradients(exact, dy.double(), *(each.double() for each in inputs))
    return [largest_error(with_gradients(function, dy, *inputs), expected) for function in (ours, torchs)]


# ----------------------------------------------------------------------------------------------------------- attention


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
            blocks_of = functools.partial(packed_blocks, sharding=sharding, documents=None)
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
                blocks = packed_blocks(source, len(own), ctx.sharding, None)
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


def attention_errors(
    ours: Callable[..., Tensor], torchs: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, *sizes: int
) -> list[float]:
    kv_heads, head_dim, tokens = sizes
    queries, keys = (2, HEADS, tokens, head_dim), (2, kv_heads, tokens, head_dim)
    dy, q, k, v = (as_in_the_model(draw(device, dtype, *shape)) for shape in (queries, queries, keys, keys))
    return errors(ours, torchs, exact_attention, dy, q, k, v)


def attention_checks(options: Options) -> Iterator[Check]:
    blockwise = {
        f"attention to blocks, cp {CP_RANKS}, {sharding}": (
            functools.partial(lambda *qkv, sharding: AttentionOfAllRanks.apply(*qkv, sharding), sharding=sharding),
            fused_attention,
        )
        for sharding in ("zigzag", "contiguous")
    }
    dtypes = [torch.bfloat16, torch.float32] + [torch.float64] * (not options.on_gpu)  # no kernel on GPUs
    sizes = ((64, 1000), (128, 1000)) if options.on_gpu else ((16, 24),)  # 1000 is no multiple of a kernel's blocks
    for dtype, kv_heads, (head_dim, tokens) in itertools.product(dtypes, (HEADS, HEADS // 4), sizes):
        for name, functions in {"`fused_attention`": (fused_attention, math_attention), **blockwise}.items():
            yield Check(
                [name, name_of(dtype), f"{HEADS} / {kv_heads} heads of {head_dim}, {tokens} tokens"],
                functools.partial(attention_errors, *functions, options.device, dtype, kv_heads, head_dim, tokens),
                LIMITS[dtype],
            )


# -------------------------------------------------------------------------------------- loss, norm, optimizer, backward


def loss_errors(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, vocab: int) -> list[float]:
    x, weight = draw(device, dtype, 2, tokens, hidden), draw(device, dtype, vocab, hidden) * (3 / math.sqrt(hidden))
    targets = torch.randint(vocab, (2, tokens), device=device)
    targets[0, :5] = -100  # ignored
    group = setup_process_group_manager(1, 1, 1, 1).tp_group

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, VocabularyShard(0, vocab, group))

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        logits = (x @ weight.t()).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())

    return errors(ours, torchs, torchs, torch.tensor(3.0, device=device), x, weight)


def norm_errors(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> list[float]:
    def norm(kind: type[nn.Module]) -> Callable[[Tensor, Tensor], Tensor]:
        def apply(x: Tensor, weight: Tensor) -> Tensor:
            module = kind(hidden, 1e-5).to(device, weight.dtype)
            return torch.func.functional_call(module, {"weight": weight}, x)

        return apply

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    x, weight, dy = (
        draw(device, dtype, tokens, hidden),
        draw(device, dtype, hidden),
        draw(device, dtype, tokens, hidden),
    )
    return errors(norm(RMSNorm), norm(LlamaRMSNorm), exact, dy, x, weight)


def optimizer_errors(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Compare the weights after three steps with torch's plain AdamW in float64, and torch's fused one beside it."""
    training = Training(learning_rate=0.1)
    start = [draw(device, dtype, 300, 200), draw(device, dtype, 200)]
    gradients = [[draw(device, torch.float32, *each.shape) for each in start] for _ in range(3)]
    wide = torch.promote_types(dtype, torch.float32)

    def torchs(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        weights = [each.to(dtype, copy=True).requires_grad_() for each in start]
        groups = [
            {"params": weights[:1], "weight_decay": training.weight_decay},
            {"params": weights[1:], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=fused, foreach=False)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.to(dtype)
            optimizer.step()
        return [each.detach() for each in weights]

    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = AdamW(parameters, training, fused=True)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            set_main_grad(parameter, gradient.to(wide))
        optimizer.step()
    masters = [optimizer.masters[each].detach() for each in parameters]
    assert all(torch.equal(each, master.to(dtype)) for each, master in zip(parameters, masters, strict=True))
    expected = torchs(torch.float64, fused=False)
    return [largest_error(found, expected) for found in (masters, torchs(wide, fused=True))]


def rope_errors(device: torch.device, dtype: torch.dtype, positions: int) -> list[float]:
    """Compare cosines and sines with those of exact angles: (position in float64) x (transformers' frequencies)."""
    config = tiny_llama(head_dim=64, rope_parameters=LLAMA3_ROPE, max_position_embeddings=131072)
    transformers, ids = LlamaRotaryEmbedding(config), torch.arange(positions, device=device)[None]
    angles = ids.double()[0, :, None] * transformers.inv_freq.to(device)
    expected = [angles.cos(), angles.sin()]
    found = [each[0, :, 0] for each in rope(config, ids)]
    theirs = [each[0, :, :32] for each in transformers.to(device)(torch.empty(0, device=device), ids)]
    return [largest_error(each, expected) for each in (found, theirs)]


def split_errors(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Compare a model's gradients, of a backward in two halves, with those of a normal backward."""
    config = tiny_llama(initializer_range=0.05)
    ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(dtype: torch.dtype, split: bool) -> list[Tensor]:
        model = our_model(config, dtype).to(device)
        if split:
            split_backward(model)
        with defer_weight_grads() as deferred:
            model(ids[:, :-1], target_ids=ids[:, 1:]).backward()
        assert len(deferred) == 7 * config.num_hidden_layers * split
        run_deferred(deferred)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(torch.float64, split=False)
    return [largest_error(gradients(dtype, split), expected) for split in (True, False)]


def other_checks(options: Options) -> Iterator[Check]:
    tokens, hidden, vocabs = (1500, 2048, (49152, 128256)) if options.on_gpu else (300, 16, (61,))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        master_dtype = torch.promote_types(dtype, torch.float32)
        checks: list[tuple[str, str, torch.dtype, Callable[..., list[float]], tuple[int, ...]]] = [
            ("`linear_cross_entropy`", f"{2 * tokens} tokens of {vocab}", dtype, loss_errors, (tokens, hidden, vocab))
            for vocab in vocabs
        ]
        checks += [
            ("`RMSNorm`", f"{tokens} x {hidden}", dtype, norm_errors, (tokens, hidden)),
            ("`AdamW`, 3 steps", "300 x 200, and 200", master_dtype, optimizer_errors, ()),
            ("`split_backward` of a model", "3 layers", dtype, split_errors, ()),
        ]
        if dtype == torch.float32:  # whatever the dtype of the model
            checks.append(("`rope`, llama3", "8192 positions", torch.bfloat16, rope_errors, (8192,)))
        for kernel, size, precision, function, sizes in checks:
            run = functools.partial(function, options.device, dtype, *sizes)
            yield Check([kernel, name_of(dtype), size], run, LIMITS[precision])


def kernels_section(options: Options) -> Lines:
    """Yield the section of the report."""
    torch.manual_seed(0)
    yield "Each kernel runs forward and backward on random numbers. The reference is its definition, in float64 on the same device."
    yield "An error is the largest |a - b| of a tensor divided by its largest |b|; the table has the largest one of the result and"
    yield "all gradients. The column torch has the error of torch's own function (of transformers', for the norm), in the same"
    yield "dtype. Attention to blocks is that of all ranks of context parallelism, computed one after the other."
    yield from header("kernel", "dtype", "size", "picotron", "torch", "limit", "result")
    yield from checked(itertools.chain(attention_checks(options), other_checks(options)), columns=2)
