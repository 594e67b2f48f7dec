"""The placement of a parameter: which part of it this rank holds, and what other ranks hold.

Each parallelism divides parameters in its own way, and describes it here. Initial weights, checkpoints, the gradient
norm and the reductions of gradients read this one description, and need not know which parallelisms are in use.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.console import UserError

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The shard of a parameter on this tp rank: `start` to `stop` of dimension `dim`, padded with zeros to `size`."""

    dim: int
    full_size: int
    start: int
    stop: int
    size: int
    replicas: int = 1  # number of tp ranks that hold this same shard

    def full_shape(self, local: torch.Size) -> torch.Size:
        return torch.Size([*local[: self.dim], self.full_size, *local[self.dim + 1 :]])


@dataclasses.dataclass(frozen=True)
class OwnedSlice:
    """The elements of a parameter that this data-parallel rank owns with ZeRO: it updates only them.

    The flattened parameters lie one after the other in a flat buffer, which is divided evenly over the ranks. So a rank
    owns consecutive elements of a parameter, perhaps none. For three parameters on two ranks:

        rank 0      | rank 1            of b, rank 0 owns elements 0 and 1, and rank 1 elements 2, 3 and 4;
        a a a a b b | b b b c c -       of a, rank 1 owns none; - is padding

    Attributes:
        weight: these elements of the weight, flat.
        numel: number of elements of the parameter.
        offset: place of the parameter's first element in the buffer.
        size: number of elements of the buffer that each rank owns.
        rank: this rank's place among the owners.
    """

    weight: Tensor
    numel: int
    offset: int
    size: int
    rank: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first element of the flattened parameter that a rank owns, and the one after its last."""
        first, last = (min(max(edge * self.size - self.offset, 0), self.numel) for edge in (rank, rank + 1))
        return first, last


@dataclasses.dataclass(frozen=True)
class Placement:
    """What each parallelism does with a parameter. By default, every rank holds it whole and computes the same.

    Attributes:
        shard: tensor parallelism: the rows or columns on this rank; None if each tp rank holds all of them.
        sum_over: the ranks that hold the same numbers as this one but use them in different computations, such as
            norms with sequence parallelism, key/value heads that several ranks share, or a matrix that is the embedding
            on one rank and the head on another. Each has a part of the gradient, see `sum_partial_gradients`.
        average_over: data parallelism: the ranks that hold the same numbers and process other tokens, over which the
            gradient is averaged, see `replicas`; None: the `cp_dp` group.
        gradient_scale: factor of that average. If each of n ranks of a `cp_dp` group holds a different parameter, which
            processes the tokens of all of them, such as an expert, 1/n: the loss is a mean over the whole group.
        is_tied: pipeline parallelism: whether another stage holds this parameter, too, such as the tied embedding on
            the first and the last stage.
        shared_name: its name on all of these stages; None if it has the same one in each of them.
        is_replica: whether that other stage's counts as the original. The gradient norm and checkpoints include the
            original only.
        owned: ZeRO: this rank's elements; None if each data-parallel rank updates all of them.
        stage: of a rank with several pipeline stages: the one whose backward completes the gradient.
        uses: number of this rank's stages that use the parameter.
    """

    shard: Shard | None = None
    sum_over: dist.ProcessGroup | None = None
    average_over: dist.ProcessGroup | None = None
    gradient_scale: float = 1.0
    is_tied: bool = False
    shared_name: str | None = None
    is_replica: bool = False
    owned: OwnedSlice | None = None
    stage: int = 0
    uses: int = 1


WHOLE = Placement()


def placement(parameter: Tensor) -> Placement:
    return getattr(parameter, "placement", WHOLE)  # torch's parameters take any attribute


def is_placed(parameter: Tensor) -> bool:
    """Return whether a parallelism has described the parameter."""
    return hasattr(parameter, "placement")


def place(parameter: Tensor, **changes: Any) -> None:
    """Change the placement of a parameter. Arguments: the attributes of `Placement` that change."""
    parameter.placement = dataclasses.replace(placement(parameter), **changes)  # type: ignore[attr-defined]


def replicas(parameter: Tensor) -> dist.ProcessGroup:
    """Return the data-parallel ranks that hold the same numbers of a parameter, over which its gradient is averaged."""
    return placement(parameter).average_over or pgm.process_group_manager.cp_dp_group


def owned_weight(parameter: Tensor) -> Tensor:
    """Return the weight that this rank owns and updates: the parameter, or a flat slice of it."""
    owned = placement(parameter).owned
    return parameter if owned is None else owned.weight


def main_grad(parameter: Tensor) -> Tensor:
    """The gradient that the optimizer reads: a tensor of the parameter's shape, in float32 or wider, in which gradients
    accumulate over micro-batches; or this rank's slice of it, see `OwnedSlice`.

    `DataParallel` allocates and fills it. (The name is Megatron-LM's.) A parameter that was frozen before it was
    wrapped, by `requires_grad_(False)`, has none, or 0 with ZeRO-3.

    Raises:
        UserError: the parameter has none, or is in no wrapper.
    """
    try:
        return parameter.main_grad  # type: ignore[attr-defined]
    except AttributeError:
        raise UserError(
            f"a parameter {list(parameter.shape)} has no main_grad; wrap its module for data parallelism, without freezing it"
        ) from None


def set_main_grad(parameter: Tensor, buffer: Tensor) -> None:
    """Let `main_grad(parameter)` be `buffer`."""
    parameter.main_grad = buffer  # type: ignore[attr-defined]


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the `main_grad`s of parameters over the ranks of their `Placement.sum_over`. The sum is only needed once per
    step, so the gradients of a group are sent together.
    """
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    # All ranks of a group need the same order. Pipeline stages may hold a shared parameter under different names.
    for parameter in sorted(model.parameters(), key=lambda each: placement(each).shared_name or ""):
        group = placement(parameter).sum_over
        if group is not None and parameter.requires_grad:
            by_group.setdefault(group, []).append(main_grad(parameter))
    for group, gradients in by_group.items():
        total = _flatten_dense_tensors(gradients)  # a view, not a copy, if there is only one gradient
        all_reduce(total, group)
        torch._foreach_copy_(gradients, _unflatten_dense_tensors(total, gradients))
