"""Places of a rank's tensors among those of the reference, found by their numbers.

In float64, different numbers do not agree to nine digits by accident.
"""

import math

import torch
from torch import Tensor

from conformance.compare import LIMIT


def alike(x: Tensor, right: Tensor) -> Tensor:
    """Say which rows of x (n, C) are which rows of right (G, C): (n, G), by their products with two random vectors."""
    draws = torch.rand(right.size(1), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    apart = ((x @ draws)[:, None] - (right @ draws)[None]).abs().amax(-1)
    return apart <= LIMIT * right.abs().max() * right.size(1)


def find_columns(x: Tensor, want: Tensor, scale: float | None = None) -> Tensor | None:
    """Find the columns of x (n, c) among those of want (n, C): (c, C); None if one of them is not there."""
    scale = want.abs().max().item() if scale is None else scale
    if x.shape == want.shape and near(x, want, scale):
        return torch.eye(want.size(1), dtype=torch.bool)
    if x.size(1) > want.size(1) or not len(x):
        return None
    found = alike(x.T, want.T)
    is_there = bool(found.any(1).all()) and near(x, want[:, found.double().argmax(1)], scale)
    return found if is_there else None


def columns_of_most(x: Tensor, want: Tensor) -> Tensor | None:
    """Find the columns of want (n, C) that agree with those of x (n, c) in most rows: (c); None if one is not there."""
    if not len(x):
        return None
    agree = ((x[:, :, None] - want[:, None]).abs() <= LIMIT * want.abs().max()).double().mean(0)
    return agree.argmax(1) if bool((agree.amax(1) > 0.5).all()) else None


def place(x: Tensor, whole: Tensor) -> tuple[int, Tensor | None] | None:
    """Find a rank's part of a weight: the dimension of which it has some, and which, (c, C), if possible consecutive
    ones; (dim, None) if it is no part of the weight; None if its shape does not say how it can be one. Rows of zeros at
    the end are padding.
    """
    flat = x.ndim == whole.ndim == 1
    x, rows = (x[:, None], whole[:, None]) if flat else (x, whole)
    if not x.numel() or x.ndim != 2 or rows.ndim != 2 or (x.size(1) != rows.size(1) and x.size(0) != rows.size(0)):
        return None
    dim = 0 if x.size(1) == rows.size(1) else 1
    if dim == 0 and not flat and x.any():
        x = x[: int(x.any(1).nonzero().max()) + 1]
    found = find_columns(*((x.T, rows.T) if dim == 0 else (x, rows)), whole.abs().max().item())
    if found is not None:
        start = next((i for i in range(found.size(1) - found.size(0) + 1) if found.diagonal(i).all()), None)
        found = found if start is None else torch.eye(found.size(1), dtype=torch.bool)[start : start + found.size(0)]
    return dim, found


def part_of(whole: Tensor, fit: tuple[int, Tensor | None]) -> Tensor:
    """Return the part of another tensor that `place` has found."""
    assert fit[1] is not None
    return whole.index_select(fit[0], fit[1].double().argmax(1))


def ratio_of(x: Tensor, want: Tensor) -> float | None:
    """Return c if x is c times `want`, and not 0."""
    square = want.square().sum().item()
    c = (x * want).sum().item() / square if square else 0.0
    return c if c and near(x, c * want, abs(c) * want.abs().max().item()) else None


def near(x: Tensor, y: Tensor, scale: float) -> bool:
    return x.shape == y.shape and bool(((x - y).abs() <= LIMIT * scale).all())


def settle(tables: list[Tensor], lead: tuple[int, ...], length: int) -> Tensor:
    """Choose one token for each row of a table (n, G), which says whose numbers it has; -1: nobody's.

    Some tokens have the same numbers, such as the first ones of two rows that begin alike. The right one is the one
    whose neighbours are right, too: one step along a dimension of `lead` is often the next token of a row. The first
    table tells most rows apart; the others are of tensors in which rows can be right that are wrong in the first.
    """
    places, used = [-1] * len(tables[0]), set[int]()
    for least, cells in enumerate(tables):
        runs = torch.stack([run_lengths(cells, lead, dim, length) for dim in range(len(lead))]).amax(0)
        certain = cells[cells.sum(1) == 1].sum(0).view(-1, length).sum(1)  # tokens of each row of the batch
        found = [(-int(runs[i, g]), -int(certain[g // length]), i, g) for i, g in cells.nonzero().tolist()]
        rows = {g // length for g in used}
        for run, _, i, g in sorted(found):
            if places[i] < 0 and g not in used and (not least or (run < -1 and g // length in rows)):
                places[i] = g
                used.add(g)
    return torch.tensor(places)


def run_lengths(cells: Tensor, lead: tuple[int, ...], dim: int, length: int) -> Tensor:
    """Count the tokens that follow each other in a row of `length` tokens and along a dimension of `lead`: (n, G)."""
    after, before, step = cells.long(), cells.long(), math.prod(lead[dim + 1 :])
    for i in range(len(cells)):
        if i // step % lead[dim]:
            previous = torch.cat([before.new_zeros(1), before[i - step, :-1]])
            previous[::length] = 0
            before[i] *= 1 + previous
    for i in reversed(range(len(cells))):
        if i // step % lead[dim] < lead[dim] - 1:
            following = torch.cat([after[i + step, 1:], after.new_zeros(1)])
            following[length - 1 :: length] = 0
            after[i] *= 1 + following
    return after + before - 1
