"""Drawing a token: the probabilities are those of transformers' warpers, and random numbers select tokens by them."""

import random

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from picotron.console import UserError
from tests.support.oracle import assert_close
from workbench.generation.sampling import Sampling, draw, probabilities


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.9, 12, 0.8), (1.0, 99, 0.01)]
)
def test_tokens_are_drawn_with_the_probabilities_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """No token of probability 0 is drawn, also with the smallest and the largest number that `random` returns."""
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, 7] = -torch.inf
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = (TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected).softmax(-1)
    sampling = Sampling(1, temperature, top_k, top_p)
    probs = probabilities(logits, sampling)
    assert_close(probs, expected, 1e-12)
    assert torch.equal(probs > 0, expected > 0)
    evenly = torch.cat([torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), (torch.arange(100_000) + 0.5) / 100_000])
    tokens = draw(logits[:1].expand(len(evenly), -1), sampling, evenly)
    assert_close(tokens.bincount(minlength=40) / len(evenly), probs[0], 1e-4)
    assert probs[0, tokens].min() > 0


def test_temperature_zero_takes_the_likeliest_token_and_small_ones_do_not_overflow() -> None:
    logits = 1e4 * torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1e-30, 1e-6, 1e-3):
        uniform = torch.tensor([random.random() for _ in range(30)], dtype=torch.float64)
        assert torch.equal(draw(logits, Sampling(1, temperature), uniform), logits.argmax(-1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"min_new_tokens": 2}, "min_new_tokens=2 .* max_new_tokens=1"),
        ({"num_return_sequences": 2}, "num_return_sequences=2 needs a temperature"),
        ({"top_k": 5, "top_p": 0.5, "seed": 1}, "3 problems"),
    ],
)
def test_numbers_out_of_range_are_errors(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**{"max_new_tokens": 1, **arguments})  # type: ignore[arg-type]
