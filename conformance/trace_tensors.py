"""What a trace compares: tensors of the ranks, and the right ones."""

import dataclasses
import enum

from torch import Tensor


class Phase(enum.IntEnum):
    """A phase of a step. Its tensors: weights, activations, their gradients, gradients of weights, the same when the
    optimizer gets them, numbers, and weights.
    """

    LOAD, FORWARD, BACKWARD, GRADIENTS, CLIP, NORM, UPDATE = range(7)


Orders = dict[tuple[int, ...], list[Tensor]]  # of tokens, by the shape of a tensor before its columns
EMBEDDED = ("model.embed_tokens", "input")
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
