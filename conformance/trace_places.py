"""What a trace compares: tensors of the ranks, and their places among those of the reference. These are found by their
numbers: in float64, different numbers do not agree to nine digits by accident.
"""

import dataclasses
import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.compare import LIMIT
from conformance.result import Part


class Phase(enum.IntEnum):
    """A phase of a step. Its tensors: weights, activations, their gradients, gradients of weights, the same when the
    optimizer gets them, numbers, and weights.
    """

    LOAD, FORWARD, BACKWARD, GRADIENTS, CLIP, NORM, UPDATE = range(7)


Orders = dict[tuple[int, ...], list[Tensor]]  # of tokens, by the shape of a tensor before its columns
EMBEDDED = ("model.embed_tokens", "input")
ANGLES = ("model.rotary_emb", "input")  # of which only the dtype and the device matter
# step, phase, the reference's name of a module, `input`, `output`, `weight` or `bias`
Key = tuple[int, Phase, str, str]


@dataclasses.dataclass
class Right:
    """A tensor of the reference.

    Args:
        x: an activation (tokens of the global batch, columns), a weight (rows, columns), or its gradient.
        order: its place in the order of the phase.
        made: the same for the first module that had this tensor.
        is_path: whether all that came before can only act through it: the input of a matrix.
        is_shared: whether all rows of the batch have the same.
    """

    x: Tensor
    order: int
    made: int
    is_path: bool = False
    is_shared: bool = False


@dataclasses.dataclass(eq=False)
class Local:
    """A tensor of a rank, of which `right[rows][:, columns]` is the right one.

    Args:
        label: name of the first module that had this tensor.
        x: the tensor (n, c), of which `right` (G, C) has the right numbers.
        rows, columns: its places there, (n) and (c); None: unknown.
        call, again: see `Record`.
        value: the activation of which it is the gradient.
        is_right: None: nothing says with which numbers to compare it.
        ranks: the ranks of whose tensors only the sum is right.
    """

    rank: int
    key: Key
    label: str
    x: Tensor
    right: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    call: int = -1
    again: bool = False
    value: "Local | None" = None
    is_right: bool | None = None
    ranks: tuple[int, ...] = ()

    @property
    def known_columns(self) -> Tensor | None:
        """Its columns, or those of the activation, or all if it has as many."""
        columns = (self.value or self).columns
        has_all = columns is None and self.x.size(1) == self.right.size(1)
        return torch.arange(self.x.size(1)) if has_all else columns


def as_matrix(x: Tensor) -> Tensor:
    return x[None] if x.ndim == 1 else x.flatten(1)


def lead_of(x: Tensor, right: Tensor) -> torch.Size:
    """Return the dimensions of tokens of an activation: (B, T), (T, B) or (n)."""
    return x.shape[: 2 if x.ndim > 2 or right.size(1) == 1 else 1]


def place_of(part: Part, whole: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensor of a part and the whole one, as matrices, and the rows and columns of the part."""
    matrix, x = as_matrix(whole), part.tensor.double()
    if len(part.start) == 1:  # a vector, or some elements of a flattened tensor
        return x[None], whole.reshape(1, -1), torch.zeros(1, dtype=torch.long), torch.arange(len(x)) + part.start[0]
    first, *others = (slice(a, a + n) for a, n in zip(part.start, x.shape, strict=True))
    columns = torch.arange(matrix.size(1)).view(whole.shape[1:])[tuple(others)].flatten()
    return x.flatten(1), matrix, torch.arange(first.start, first.stop), columns


def near(x: Tensor, y: Tensor, scale: float) -> bool:
    return x.shape == y.shape and bool(((x - y).abs() <= LIMIT * scale).all())


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def rows_alike(x: Tensor, right: Tensor) -> Tensor:
    """Say which rows of x (n, C) are which rows of right (G, C): (n, G), by their products with two random vectors."""
    draws = torch.rand(2, right.size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    bound = LIMIT * right.abs().max() * right.size(1)
    one, other = (((x @ draw)[:, None] - right @ draw).abs() <= bound for draw in draws)
    return one & other


def first_alike(x: Tensor, right: Tensor) -> Tensor:
    """Say in which rows of right (G, C) the first number of each row of x (n, c) is: (n, G), by a search in the sorted
    numbers, because a comparison of all n G C pairs would take most of the time of a trace.
    """
    numbers, order = right.flatten().sort()
    bound, alike = LIMIT * right.abs().max(), torch.zeros(len(x), len(right), dtype=torch.bool)
    starts = torch.searchsorted(numbers, x[:, 0] - bound)
    ends = torch.searchsorted(numbers, x[:, 0] + bound, right=True)
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        alike[i, order[start:end] // right.size(1)] = True
    return alike


def find(x: Tensor, right: Tensor) -> Tensor | None:
    """Find the columns of x (n, c) among those of right (n, C), if possible consecutive ones: (c); None if one of them
    is not there.
    """
    scale, columns = right.abs().max().item(), torch.arange(x.size(1))
    if near(x, right, scale):
        return columns
    cells = rows_alike(x.T, right.T)
    starts = (i for i in range(right.size(1) - x.size(1) + 1) if cells.diagonal(i).all())
    start = next(starts, None)
    columns = cells.int().argmax(1) if start is None else columns + start
    return columns if near(x, right[:, columns], scale) else None


def locate(x: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
    """Find the rows and columns of a weight; None if it has neither all rows nor all columns of the right one."""
    if x.size(1) == right.size(1):
        x = x[: int(x.any(1).nonzero().max()) + 1] if x.any() else x
        rows = find(x.T, right.T)
        return None if rows is None else (rows, torch.arange(x.size(1)))
    columns = find(x, right) if len(x) == len(right) and x.numel() else None
    return None if columns is None else (torch.arange(len(x)), columns)


def ratio_of(x: Tensor, want: Tensor) -> float | None:
    """Return c if x is c times `want`, and not 0."""
    square = want.square().sum().item()
    c = (x * want).sum().item() / square if square else 0.0
    return c if c and near(x, c * want, abs(c) * want.abs().max().item()) else None


def regularity(rows: Tensor) -> int:
    """Return how many numbers of tokens follow the one before in the most frequent way; -1 if they are not different
    ones, or a token is nobody.
    """
    steps = rows.diff()
    if not (rows >= 0).all() or len(rows.unique()) < len(rows):
        return -1
    return int((steps == steps.mode().values).sum()) if len(steps) else 0


def steps_of(table: Tensor, dim: int, length: int) -> list[int]:
    """Return by how much the numbers of tokens can differ from one place to the next, along a dimension of a table of
    candidates (*lead, G): 1 and -1, and multiples of the length of a row, of which the most frequent one.
    """
    n = table.size(dim)
    one, other = (table.narrow(dim, start, max(n - 1, 0)).flatten(0, -2) > 0 for start in (0, 1))
    rows = [k * length for k in range(1, table.size(-1) // length)]
    counts = {step: int((one[:, :-step] & other[:, step:]).sum()) for step in rows}
    row = max(counts, key=counts.__getitem__, default=length)
    return [1, row, -1, -row]


def settle(votes: Tensor, lead: tuple[int, ...], length: int) -> Tensor:
    """Choose one token for each row of a table of votes (n, G), which says whose numbers it has; -1: nobody's.

    Some tokens have the same numbers, such as the first ones of two rows that begin alike, and wrong numbers can be
    those of another token by accident. Of the tokens with many votes, the right one has most votes beside it: along a
    dimension of `lead`, the next token of a row often follows, or the same token of the next row or of one after it.

    Args:
        length: number of tokens of a row of the batch.
    """
    n = votes.size(0)
    if len(lead) == 1 and n > length and n % length == 0:  # (B*T) or (T*B)
        found = [settle(votes, shape, length) for shape in ((n // length, length), (length, n // length))]
        return max(found, key=lambda rows: len(rows.unique()))
    most = votes.amax(-1, keepdim=True).clamp(min=1)
    table = (votes / most * (2 * votes > most)).view(*lead, -1)
    beside = table.clone()
    for dim in range(len(lead)):
        for step in steps_of(table, dim, length):
            run = torch.zeros_like(table.select(dim, 0))  # votes of those before, of which near ones count more
            for i in range(lead[dim])[:: 1 if step > 0 else -1]:
                beside.select(dim, i).add_(run)
                run = 0.75 * F.pad(run + table.select(dim, i), (step, -step))
    score = (beside * table).view(votes.shape)
    rows = score.argmax(1).masked_fill(~score.any(1), -1)
    few = (votes.amax(1) * 2 <= votes.max()) & (rows >= 0)
    if few.any() and (votes[few] == votes[few][0]).all():  # padding: it has an id, too, but is nobody in later layers
        rows[few], score[few], after = -1, 0.0, -1  # the first document may begin anywhere
        for i in (rows >= 0).nonzero()[:, 0].tolist():  # a short document often comes after the one before it
            score[i, after : after + 1] *= 4
            rows[i] = score[i].argmax()
            after = int(rows[i]) + 1
    return rows
