"""Solution to exercise 2 of docs/generation.md: min-p sampling (Nguyen et al. 2024, arXiv:2407.01082)."""

from torch import Tensor


def min_p(probabilities: Tensor, fraction: float) -> Tensor:
    """Drop tokens that are less likely than a fraction of the likeliest one: (b, V) -> (b, V)."""
    limit = fraction * probabilities.amax(-1, keepdim=True)
    kept = probabilities.masked_fill(probabilities < limit, 0.0)
    return kept / kept.sum(-1, keepdim=True)
