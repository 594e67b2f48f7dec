"""Slices of parameters: with ZeRO, each data-parallel rank owns some elements of each parameter, and updates only them.

(Rajbhandari et al. 2019, arXiv:1910.02054.) The flattened parameters lie one after the other in a flat buffer, which is
divided evenly over the ranks. So a rank owns consecutive elements of a parameter, perhaps none. For three parameters on
two ranks:

    rank 0      | rank 1            of b, rank 0 owns elements 0 and 1, and rank 1 elements 2, 3 and 4;
    a a a a b b | b b b c c -       of a, rank 1 owns none; - is padding

Without ZeRO, parameters have no slices: each rank owns all elements.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron.collectives import own_slice
from picotron.model.weights import Index, ReadTensor, Shard, copy_shard, parameters_and_shards, set_main_grad

AfterUpdate = Callable[[], dist.Work | None]


@dataclasses.dataclass(frozen=True)
class OwnedSlice:
    """The elements of a parameter that this rank owns.

    Attributes:
        weight: these elements of the weight, flat.
        numel: number of elements of the parameter.
        offset: place of the parameter's first element in the buffer.
        size: number of elements of the buffer that each rank owns.
        rank: this rank's place among the owners.
        after_update: function that the optimizer calls after it has updated the slices of the buffer. It starts to send
            the new weights to the other ranks, or frees the old ones. It may return a handle to wait for.
    """

    weight: Tensor
    numel: int
    offset: int
    size: int
    rank: int
    after_update: AfterUpdate

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first element of the flattened parameter that a rank owns, and the one after its last."""
        first, last = (min(max(edge * self.size - self.offset, 0), self.numel) for edge in (rank, rank + 1))
        return first, last


def owned_slice(parameter: Tensor) -> OwnedSlice | None:
    """Return the slice of a parameter that this rank owns, or None if it owns the parameter."""
    return getattr(parameter, "owned_slice", None)


def owned_weight(parameter: Tensor) -> Tensor:
    """Return the weight that this rank owns and updates: the parameter, or a flat slice of it."""
    owned = owned_slice(parameter)
    return parameter if owned is None else owned.weight


def divide(
    parameters: list[nn.Parameter],
    full: Tensor,
    weights: Tensor,
    gradients: Tensor,
    group: dist.ProcessGroup,
    after_update: AfterUpdate,
) -> None:
    """Divide parameters over the ranks of a group: let the parameters be views of a flat buffer, with the values that
    they have, and let `owned_slice` and `main_grad` be views of this rank's slices.

    Args:
        full: the buffer.
        weights, gradients: this rank's slices of the buffer's weights and gradients.
        after_update: see `OwnedSlice`.
    """
    own, rank, offset = own_slice(full, group), dist.get_rank(group), 0
    for parameter in parameters:
        view = full[offset : offset + parameter.numel()].view_as(parameter)
        if parameter.untyped_storage().nbytes() > 0:
            view.copy_(parameter.detach())
        parameter.data = view
        start, stop = (min(max(edge, offset), offset + parameter.numel()) - own.start for edge in (own.start, own.stop))
        owned = OwnedSlice(weights[start:stop], parameter.numel(), offset, len(weights), rank, after_update)
        parameter.owned_slice = owned  # type: ignore[attr-defined]  # torch's parameters take any attribute
        set_main_grad(parameter, gradients[start:stop])
        offset += parameter.numel()


def copy_owned(tensor: Tensor, parameter: nn.Parameter, name: str, shard: Shard | None, read: ReadTensor) -> None:
    """Copy the elements of a parameter that this rank owns, or the optimizer's state for them, into `tensor`, as in
    `copy_shard`. Reads no rows without such elements.
    """
    owned = owned_slice(parameter)
    if owned is None:
        return copy_shard(tensor, name, shard, read)
    if tensor.numel() == 0:
        return None
    first, last = owned.bounds(owned.rank)
    columns = parameter.shape[1:].numel()
    rows = slice(first // columns, -(-last // columns))
    values = tensor.new_zeros(rows.stop - rows.start, *parameter.shape[1:])
    if shard is not None and shard.dim == 0:
        start, stop = (min(shard.start + row, shard.stop) for row in (rows.start, rows.stop))
        if start < stop:  # there are rows that are not padding
            copy_shard(values, name, dataclasses.replace(shard, start=start, stop=stop, size=len(values)), read)
    else:

        def read_rows(name: str, shape: torch.Size, index: Index) -> Tensor:
            return read(name, torch.Size([len(parameter), *shape[1:]]), (rows, *index[1:]))

        copy_shard(values, name, shard, read_rows)
    tensor.copy_(values.flatten()[first - rows.start * columns :][: last - first])
    return None


def read_owned_weights(model: nn.Module, read: ReadTensor) -> None:
    """Fill the `owned_weight` of each parameter with what `read` returns."""
    for name, parameter, shard in parameters_and_shards(model):
        copy_owned(owned_weight(parameter), parameter, name, shard, read)
