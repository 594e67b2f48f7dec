"""Slices of parameters: together they are the parameter, and no rank reads more rows of a file than it needs."""

import pytest
import torch
from torch import Tensor, nn

from picotron.model.placement import Index, OwnedSlice, Shard, place
from picotron.model.weights import copy_part

FULL = torch.arange(1.0, 7 * 6 + 1).view(7, 6)
VECTOR = torch.arange(1.0, 8.0)
SHARDS = {
    "replicated": (FULL, (7, 6), None),
    "vector": (VECTOR, (7,), None),
    "rows": (FULL, (4, 6), Shard(dim=0, full_size=7, start=0, stop=4, size=4)),
    "rows with padding": (FULL, (4, 6), Shard(dim=0, full_size=7, start=4, stop=7, size=4)),
    "rows with more padding than values": (FULL, (6, 6), Shard(dim=0, full_size=7, start=6, stop=7, size=6)),
    "columns": (FULL, (7, 3), Shard(dim=1, full_size=6, start=3, stop=6, size=3)),
}


@pytest.mark.parametrize("ranks", [1, 2, 5, 50])
@pytest.mark.parametrize("offset", [0, 11])
@pytest.mark.parametrize("case", SHARDS)
def test_slices_of_all_ranks_together_are_the_shard(case: str, offset: int, ranks: int) -> None:
    full, local, shard = SHARDS[case]
    parameter, expected = nn.Parameter(torch.empty(local)), torch.empty(local)
    rows_read: list[int] = []

    def read(name: str, shape: torch.Size, index: Index) -> Tensor:
        assert (name, shape) == ("name", full.shape)
        values = full[index or ...]
        assert len(values) > 0, "nothing to read"
        rows_read.append(len(values))
        return values

    place(parameter, shard=shard)
    copy_part(expected, parameter, "name", read)
    size = -(-(offset + parameter.numel()) // ranks)
    slices = []
    for rank in range(ranks):
        weight = torch.empty(0)
        owned = OwnedSlice(weight, parameter.numel(), offset, size, rank)
        place(parameter, shard=shard, owned=owned)
        first, last = owned.bounds(rank)
        slices.append(torch.full((last - first,), torch.nan))
        rows_read.clear()
        copy_part(slices[-1], parameter, "name", read)
        columns = parameter.shape[1:].numel()
        assert sum(rows_read) <= (last - first) // columns + (2 if last > first else 0)
    assert torch.equal(torch.cat(slices).view(local), expected)
