"""Choice of the next token from the logits."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from picotron.console import UserError

SMALLEST_TEMPERATURE = 1e-6  # below it, the quotient of logits and temperature could overflow


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to continue a prompt.

    Args:
        max_new_tokens: maximum number of tokens to generate.
        temperature: divisor of the logits before the softmax; 0 always takes the likeliest token.
        top_k: number of likeliest tokens to draw from, or more if the last ones are equally likely; 0 draws from all.
        top_p: draw from the smallest set of likeliest tokens whose probabilities sum to at least this number (nucleus
            sampling, Holtzman et al. 2019, arXiv:1904.09751), after `top_k`; 1 draws from all.
        seed: seed of the random draws.
        ends: tokens that end a sequence; without any, each is as long as the two limits allow.
        min_new_tokens: number of new tokens before which no end token can be drawn.
        num_return_sequences: number of completions of each prompt, with separate streams of random numbers.
        allowed_tokens: function of the tokens of a sequence so far, with the prompt, that returns the tokens that can
            be drawn next, a list or a tensor of integers; None allows all. The ranks with the last stage call it before
            each draw.
        max_length: maximum number of tokens of a prompt and its completion together; None: no limit.

    Raises:
        UserError: a number is out of range, or useless at temperature 0.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ends: tuple[int, ...] = ()
    min_new_tokens: int = 0
    num_return_sequences: int = 1
    allowed_tokens: Callable[[list[int]], Sequence[int] | Tensor] | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        for name, valid, limits in (
            ("max_new_tokens", most >= 0, "at least 0"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= most, f"from 0 to max_new_tokens={most}"),
            ("num_return_sequences", self.num_return_sequences >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not valid:
                raise UserError(f"{name}={getattr(self, name)} should be {limits}")
        if self.temperature == 0:
            neutral = {"top_k": 0, "top_p": 1, "seed": 0, "num_return_sequences": 1}
            problems = [
                f"{name}={getattr(self, name)} needs a temperature above 0, because temperature 0 always takes the likeliest "
                f"token; set a temperature, or remove {name}"
                for name, value in neutral.items()
                if getattr(self, name) != value
            ]
            if problems:
                raise UserError(*problems)

    def length(self, prompt: int) -> int:
        """Return the maximum number of tokens of a prompt of `prompt` tokens and its completion."""
        length = prompt + self.max_new_tokens
        return length if self.max_length is None else min(length, self.max_length)


def mask_logits(logits: Tensor, sampling: Sampling, sequences: Sequence[list[int]], new: int) -> Tensor:
    """Set the logits (b, V) of tokens that cannot be drawn to -inf, see `min_new_tokens` and `allowed_tokens`.

    Args:
        sequences: tokens of each sequence so far, with the prompt.
        new: number of new tokens of each sequence so far.

    Raises:
        UserError: no token of a sequence is left, or `allowed_tokens` does not return tokens of the vocabulary.
    """
    if new >= sampling.min_new_tokens and sampling.allowed_tokens is None:
        return logits
    vocab_size = logits.size(-1)
    drawable = torch.full(logits.shape, sampling.allowed_tokens is None)
    if sampling.allowed_tokens is not None:
        for row, sequence in enumerate(sequences):
            allowed = sampling.allowed_tokens([*sequence])
            tokens = torch.as_tensor(allowed, device="cpu")
            if tokens.dtype != torch.int64 or not tokens.numel() or tokens.min() < 0 or tokens.max() >= vocab_size:
                raise UserError(
                    f"allowed_tokens returned {allowed!s:.60} for a sequence of {len(sequence)} tokens; return one or more "
                    f"integers from 0 to {vocab_size - 1}, in a list or an int64 tensor"
                )
            drawable[row, tokens] = True
    if new < sampling.min_new_tokens:
        drawable[:, [end for end in sampling.ends if 0 <= end < vocab_size]] = False
    if not drawable.any(-1).all():
        raise UserError(
            f"no token is left to draw, because min_new_tokens={sampling.min_new_tokens} excludes the end tokens, and there "
            f"are no others; use fewer min_new_tokens, or allow other tokens"
        )
    return logits.masked_fill(~drawable.to(logits.device), -torch.inf)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Compute the probabilities with which tokens are drawn, those of transformers: logits (b, V) -> (b, V) in float64,
    for a temperature above 0.
    """
    scores = logits.double() / sampling.temperature
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)


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
