"""Check of puzzle 22: what one process drops, in other layouts' parts, and which numbers fall together."""

import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from puzzles.group import Group
from puzzles.pictures import PALE, Cell, rows
from puzzles.report import RED, Report
from puzzles.tensors import randn

RATE = 0.25
SAMPLES, POSITIONS, LAYERS, D = torch.arange(1000, 1008), torch.arange(32), 4, 16
PARTS: dict[str, tuple[Any, Any]] = {  # the samples and the positions of a rank
    "dp 2, rank 1": (slice(4, 8), slice(None)),
    "micro-batches of one sample": (slice(5, 6), slice(None)),
    "cp 2, zigzag, rank 0": (slice(None), [*range(8), *range(24, 32)]),
    "sequence parallelism, tp rank 1": (slice(None), slice(16, 32)),
    "the samples in another order": ([6, 0, 3], slice(None)),
    "recomputation": (slice(None), slice(None)),
}
AXES = ("sample", "position", "layer", "place in D")


def check(learner: ModuleType, group: Group, report: Report) -> None:
    torch.manual_seed(22)
    state, y = torch.get_rng_state(), randn(len(SAMPLES), len(POSITIONS), D, seed=0)

    def call(case: str, layer: int, i: Any = slice(None), j: Any = slice(None)) -> tuple[Tensor, Tensor]:
        report.begin(f"{case}, layer {layer}")
        x = y[i][:, j].clone().requires_grad_()
        result, _ = group.call(lambda *others: learner.dropout(x, *others), SAMPLES[i], POSITIONS[j], layer)
        return x, result

    whole = []
    for layer in range(LAYERS):
        x, result = call("one process", layer)
        kept = result.detach() != 0 if isinstance(result, Tensor) and result.shape == y.shape else y
        whole.append(y * kept / (1 - RATE))
        group.expect(result, whole[-1], report.case, "y")
        (gradient,) = torch.autograd.grad(result.sum(), x)
        group.expect(gradient, kept.double() / (1 - RATE), report.case, "the gradient of y")
    for case, (i, j) in PARTS.items():
        for layer in reversed(range(LAYERS)):
            group.expect(call(case, layer, i, j)[1], whole[layer][i][:, j], report.case, "y")
    group.require(bool((torch.get_rng_state() == state).all()), "the state of torch's own generator has changed")

    dropped = torch.stack(whole, 2) == 0  # (samples, positions, layers, D)
    report.picture = draw(dropped)
    share = dropped.double().mean().item()
    group.require(abs(share - RATE) < 0.02, f"{share:.1%} of all numbers are dropped, expected {RATE:.0%}")
    # The share of pairs at each distance that are both dropped, by the convolution theorem.
    pairs = torch.fft.ifftn(torch.fft.fftn(dropped.double()).abs().square()).real / dropped.numel()
    pairs[0, 0, 0, 0] = RATE**2  # each number with itself
    worst = torch.unravel_index((pairs - RATE**2).abs().argmax(), pairs.shape)
    steps = (by - n if 2 * by > n else by for by, n in zip(worst, pairs.shape, strict=True))
    apart = ", ".join(f"{axis} {by:+d}" for axis, by in zip(AXES, steps, strict=True) if by)
    sentence = f"{pairs[worst]:.1%} of all numbers are dropped together with those at {apart}, expected {RATE**2:.1%}"
    group.require(abs(pairs[worst].item() - RATE**2) < 0.015, sentence)  # 6 standard deviations


def draw(dropped: Tensor) -> str:
    lines = [
        (
            f"sample {SAMPLES[i]}, layer {layer}",
            [Cell("", RED if each else PALE, 0.2) for each in dropped[i, :, layer, 0]],
        )
        for i, layer in itertools.product(range(2), range(2))
    ]
    return rows("The first number of each position", lines, "Red: dropped.", 24)
