"""Context parallelism: its errors in bfloat16, its work, its memory and the ring."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.worker_pool import WorkerPool
from picotron.config import Distributed
from picotron.console import UserError
from picotron.context_parallel import block_attention
from picotron.context_parallel.context_parallel import local_positions
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import (
    make_config,
    tiny_llama,
)
from workbench.run.layout_checks import check_context_parallel
from workbench.variants.choose import attention

LENGTH = 96


def attention_inputs() -> tuple[Tensor, ...]:
    """Return full-sequence q, k, v and the gradient of the output, with 24 query heads and 12 key/value heads."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, LENGTH, 8, generator=generator).double() for heads in (24, 12, 12, 24))


def attention_of_a_rank(engine: str, sharding: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return this rank's positions, and its shards of the output and of the gradients of q, k and v."""
    cp = dist.get_world_size()
    grid = setup_process_group_manager(1, cp, 1, 1)
    layout = {"distributed__cp_engine": engine, "distributed__cp_sharding": sharding}
    config = make_config(distributed__cp_size=cp, training__seq_length=LENGTH, **layout)
    positions = local_positions(LENGTH, cp, grid.cp_rank, sharding)
    # The strides are those of the model, which transposes (B, T, H, K).
    *qkv, dy = (x[:, :, positions].to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in attention_inputs())
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    y = attention(config)(q, k, v)
    y.backward(dy)
    assert all(x.dtype == dtype for x in (y, q.grad, k.grad, v.grad))
    return positions, y.detach(), q.grad, k.grad, v.grad


def whole_attention() -> list[Tensor]:
    """Return output and gradients of PyTorch's attention over the full sequences."""
    q, k, v, dy = (x.requires_grad_() for x in attention_inputs())
    with sdpa_kernel(SDPBackend.MATH):
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y.backward(dy.detach())
    return [y.detach(), q.grad, k.grad, v.grad]


def joined(results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    order = torch.cat([positions for positions, *_ in results]).argsort()
    parts = zip(*(rest for _, *rest in results), strict=True)
    return [torch.cat(part, 2)[:, :, order] for part in parts]


def errors_of(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)]


def test_bfloat16_errors_do_not_grow_with_the_ring(pool: WorkerPool) -> None:
    """Blocks are combined in float32, so their number does not affect the error, nor does the engine the sums."""
    expected, errors = whole_attention(), {}
    for cp in (2, 6):
        ring, gathered = (
            joined(pool.run(attention_of_a_rank, cp, engine, "zigzag", torch.bfloat16))
            for engine in ("ring", "all_gather")
        )
        assert max(errors_of(gathered, ring)) < 2e-4
        errors[cp] = errors_of(ring, expected)
    for few, many, name in zip(errors[2], errors[6], ("y", "dq", "dk", "dv"), strict=True):
        assert 0 < many < 1.1 * few, f"{name}: {many} in 6 parts, {few} in 2"


def pairs_computed(engine: str, sharding: str) -> tuple[int, int]:
    """Count the query-key pairs that this rank computes in forward and backward, without the masked ones."""
    counts = [0, 0]

    def pairs(q: Tensor, k: Tensor, causal: bool) -> int:
        return q.size(2) * (q.size(2) + 1) // 2 if causal else q.size(2) * k.size(2)

    forward, backward = block_attention.block_forward, block_attention.block_backward

    def count_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, *others: Any) -> Any:
        counts[0] += pairs(q, k, causal)
        return forward(q, k, v, causal, *others)

    def count_backward(dy: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, *others: Any) -> Any:
        counts[1] += pairs(q, k, causal=others[1])
        return backward(dy, q, out, lse, k, *others)

    counting = {"block_forward": count_forward, "block_backward": count_backward}
    with mock.patch.multiple(block_attention, **counting):
        attention_of_a_rank(engine, sharding, torch.float64)
    return counts[0], counts[1]


@pytest.mark.parametrize(("engine", "cp"), [("ring", 4), ("all_gather", 2)])
def test_zigzag_is_balanced_and_skips_masked_blocks(pool: WorkerPool, engine: str, cp: int) -> None:
    everything = LENGTH * (LENGTH + 1) // 2
    zigzag = pool.run(pairs_computed, cp, engine, "zigzag")
    assert zigzag == [(everything // cp, everything // cp)] * cp
    forward = [pairs for pairs, _ in pool.run(pairs_computed, cp, engine, "contiguous")]
    assert sum(forward) == everything
    # Counted in blocks, the maximum is (2 cp - 1) / cp of the mean. A diagonal block has just over half the pairs.
    assert max(forward) / (everything / cp) == pytest.approx((2 * cp - 1) / cp, rel=0.05)


def tensors_that_travel() -> list[tuple[int, int]]:
    """At each send, count the live tensors that have been sent or received: keys and values, and float32 gradients."""
    dtypes: Any = weakref.WeakKeyDictionary()  # dtype of each live storage
    alive: list[tuple[int, int]] = []
    original = dist.batch_isend_irecv

    def batch_isend_irecv(messages: list[dist.P2POp]) -> Any:
        dtypes.update({message.tensor.untyped_storage(): message.tensor.dtype for message in messages})
        found = list(dtypes.values())
        alive.append((found.count(torch.bfloat16), found.count(torch.float32)))
        return original(messages)

    with mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv):
        attention_of_a_rank("ring", "zigzag", torch.bfloat16)
    return alive


def test_sent_tensors_are_freed(pool: WorkerPool) -> None:
    """Only the tensors in use and those being received are in memory."""
    forward, backward = [(2, 0)] * 3, [(2, 0), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2), (1, 2)]
    assert pool.run(tensors_that_travel, 4) == [forward + backward] * 4


def test_ring_rejects_head_dims_without_a_gpu_kernel() -> None:
    small = tiny_llama(head_dim=20)
    check_context_parallel(small, Distributed(cp_size=2, use_cpu=True))
    check_context_parallel(small, Distributed(cp_size=2, cp_engine="ulysses"))
    with pytest.raises(UserError, match=r"'ring' .* head_dim .* not 20"):
        check_context_parallel(small, Distributed(cp_size=2))
