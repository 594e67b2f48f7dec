"""Exercises and counts of docs/generation.md."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MinPLogitsWarper

from conformance.oracle import assert_close
from docs.programs import count_generation
from docs.solutions.cache_bytes import cache_bytes
from docs.solutions.min_p import min_p


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "columns"), [(count_generation.tokens_computed, (1, 2)), (count_generation.caches, (1, 2))]
)
def test_counts_equal_formulas(table: Any, columns: tuple[int, int]) -> None:
    _, *rows = table()
    assert len(rows) >= 3
    for row in rows:
        assert row[columns[0]] == row[columns[1]]


def test_bytes_of_a_cache() -> None:
    llama_3_8b = LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    assert cache_bytes(llama_3_8b, 1, 1) == 128 * 2**10
    assert cache_bytes(llama_3_8b, 32, 8192) == 32 * 2**30
    model = count_generation.MODEL
    counted = next(row[1] for row in count_generation.caches() if row[0] == "one process")
    assert cache_bytes(model, count_generation.PROMPTS, 64, 4) == counted * 2**10


@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
def test_min_p_equals_transformers(fraction: float) -> None:
    logits = 3 * torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = MinPLogitsWarper(fraction)(None, logits).softmax(-1)
    assert_close(min_p(logits.softmax(-1), fraction), expected, 1e-12)
