"""Choice of the next token from the logits."""

import dataclasses

import torch
from torch import Tensor

from picotron.console import UserError

SMALLEST_TEMPERATURE = 1e-6  # below it, the quotient of logits and temperature could overflow


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to continue a prompt.

    Args:
        max_new_tokens: maximum number of tokens to generate.
        temperature: divisor of the logits before the softmax; 0 always takes the likeliest token.
        top_k: number of likeliest tokens to draw from; 0 draws from all.
        top_p: draw from the smallest set of likeliest tokens whose probabilities sum to at least this number (nucleus
            sampling, Holtzman et al. 2019, arXiv:1904.09751), after `top_k`; 1 draws from all.
        seed: seed of the random draws.
        ends: tokens that end a sequence; without any, each has max_new_tokens.

    Raises:
        UserError: a number is out of range, or has no effect at this temperature.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, valid, limits in (
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not valid:
                raise UserError(f"{name}={getattr(self, name)} should be {limits}")
        if self.temperature == 0:
            changed = {"top_k": self.top_k != 0, "top_p": self.top_p != 1, "seed": self.seed != 0}
            problems = [
                f"{name}={getattr(self, name)} has no effect at temperature 0, which always takes the likeliest token; set a "
                f"temperature above 0, or remove {name}"
                for name, is_changed in changed.items()
                if is_changed
            ]
            if problems:
                raise UserError(*problems)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Compute the probabilities with which tokens are drawn: logits (b, V) -> (b, V) in float64, for a temperature
    above 0.
    """
    probs = (logits.double() / sampling.temperature).softmax(-1)
    top_k = sampling.top_k or probs.size(-1)
    if top_k >= probs.size(-1) and sampling.top_p == 1:
        return probs
    ranked, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ranked[:, top_k:] = 0
    before = ranked.cumsum(-1) - ranked  # probability of the likelier tokens
    ranked[before >= sampling.top_p * ranked.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter_(-1, tokens, ranked / ranked.sum(-1, keepdim=True))


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Draw the next token of each sequence: logits (b, V), uniform random numbers from [0, 1), (b,) -> (b,).

    The token is the first one whose cumulative probability exceeds the random number, so each sequence can have a
    separate stream of random numbers, and the draws do not depend on which sequences are drawn together.
    """
    if sampling.temperature < SMALLEST_TEMPERATURE:
        return logits.argmax(-1)
    cumulative = probabilities(logits, sampling).cumsum(-1)
    cumulative = cumulative / cumulative[:, -1:]  # ends with exactly 1, which exceeds every number
    return torch.searchsorted(cumulative, uniform[:, None], right=True)[:, 0]
