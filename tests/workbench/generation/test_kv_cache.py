"""The cache of keys and values: its size, and what is left after sequences have ended."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.oracle import CPU
from workbench.generation.kv_cache import KVCache
from workbench.variants.packed import PackedDocuments


def test_the_cache_grows_in_blocks_and_drops_sequences() -> None:
    heads, size, cache = 2, 8, KVCache([3, 60, 1], max_length=130)
    cache.kv[0] = torch.zeros(2, 3, heads, cache.columns, size)
    assert cache.columns == 64
    for _ in range(5):
        cache.append(torch.float32, CPU)
    assert sum(kv.nbytes for kv in cache.kv.values()) == 2 * 3 * heads * 128 * size * 4
    cache.keep([0, 2])  # the long one is dropped, and the columns that only it used
    assert (cache.starts, cache.length, cache.max_length) == ([0, 2], 8, 73)
    for _ in range(65):
        cache.append(torch.float32, CPU)
    assert cache.kv[0].size(3) == cache.columns == 73  # no more than will be used


def test_a_token_never_makes_cudnn_build_a_plan() -> None:
    """Each token adds a key, and cuDNN, torch's first choice on Hopper GPUs, needs a plan for each number of keys."""
    real, allowed = functional.scaled_dot_product_attention, []

    def attend(*qkv: Tensor, **options: Any) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*qkv, **options)

    cache = KVCache([5, 9], max_length=40)
    q, kv = torch.randn(1, 8, 14, 16), torch.randn(1, 2, 14, 16)
    cache.attention([0])(q, kv, kv, PackedDocuments.of(torch.tensor([0, 5, 14]), CPU))
    with mock.patch.object(functional, "scaled_dot_product_attention", attend):
        cache.append(torch.float32, CPU)
        q, kv = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 1, 16)
        cache.attention([0])(q, kv, kv, None)
    assert (allowed, torch.backends.cuda.cudnn_sdp_enabled()) == ([False], True)
