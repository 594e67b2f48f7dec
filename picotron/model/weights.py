"""How a rank's parts of the weights get their values: from a checkpoint, or drawn."""

import hashlib
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron.model.families import differences
from picotron.model.llama import Llama
from picotron.model.placement import Index, owned_weight, place, placement

TILE = 256  # rows and columns of a matrix that are drawn at a time
ALL = slice(None)

ReadTensor = Callable[[str, torch.Size, Index], Tensor]
"""`read(name, shape, index)` returns the slice `[index]` of the parameter `name`, whose full shape is `shape`"""


def copy_part(tensor: Tensor, parameter: Tensor, name: str, read: ReadTensor) -> None:
    """Copy what this rank holds of a parameter, or of the optimizer's state for it, into `tensor`: all of it, a shard,
    or with ZeRO this rank's elements. Padding becomes 0. Reads no rows that this rank does not need.
    """
    shard, owned = placement(parameter).shard, placement(parameter).owned
    first, last = (0, parameter.numel()) if owned is None else owned.bounds(owned.rank)
    if first == last:
        return
    if shard is None and owned is None:
        tensor.copy_(read(name, parameter.shape, ()))  # without a slice, a file need not be copied
        return
    columns = parameter.shape[1:].numel()
    rows = slice(first // columns, -(-last // columns))  # of the shard: those with this rank's elements
    shape, index = list(parameter.shape), [rows] if shard is None else [rows, *[ALL] * shard.dim]
    if shard is not None:
        start, stop = shard.start, shard.stop
        if shard.dim == 0:
            start, stop = (min(start + row, stop) for row in (rows.start, rows.stop))
        shape[shard.dim], index[shard.dim] = shard.full_size, slice(start, stop)
    held = torch.Size([rows.stop - rows.start, *parameter.shape[1:]])
    is_padding = index[0].start == index[0].stop  # all of these rows
    values = tensor.new_zeros(held) if is_padding else read(name, torch.Size(shape), tuple(index))
    if values.shape != held:  # padding follows the rows or the columns of a shard
        padded = values.new_zeros(held)
        padded[tuple(map(slice, values.shape))] = values
        values = padded
    tensor.copy_(values.flatten()[first - rows.start * columns :][: last - first].view_as(tensor))


def read_owned_weights(model: nn.Module, read: ReadTensor) -> None:
    """Fill the `owned_weight` of each parameter with what `read` returns."""
    for name, parameter in model.named_parameters():
        copy_part(owned_weight(parameter), parameter, name, read)


def materialise(model: Llama, device: torch.device, read: ReadTensor | None) -> None:
    """Allocate the parameters of a model on the meta device, and fill them with what `read` returns.

    Args:
        read: None leaves the parameters without memory.
    """
    for name, parameter in list(model.named_parameters()):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if read is None:
            values.untyped_storage().resize_(0)
        else:
            copy_part(values, parameter, name, read)
        owner, _, leaf = name.rpartition(".")
        allocated = nn.Parameter(values, parameter.requires_grad)
        place(allocated, **vars(placement(parameter)))
        setattr(model.get_submodule(owner), leaf, allocated)
    model.frequencies = model.frequencies.to(device)  # here, because the CPU waits for a copy to a GPU
    model.tie_weights()


def initial_weights(config: PreTrainedConfig, seed: int) -> ReadTensor:
    """Return a reader of initial weights with transformers' distribution: normal with standard deviation
    `initializer_range`; biases are 0, and norms multiply by 1.

    A matrix consists of tiles of TILE rows and columns. Each tile has its own CPU generator, seeded by (seed, name,
    number of the tile), and a rank draws only the tiles that its shard overlaps. So the numbers do not depend on the
    layout, and several threads can draw them. (Seeds have 32 bits: matrices of a very large model can share tiles.)
    """
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    padding = None if config.pad_token_id is None else config.pad_token_id % config.vocab_size  # -1: the last row

    def draw(name: str, shape: torch.Size, index: Index) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - differences(config).norm_offset)[index]
        if name.endswith("bias"):
            return torch.zeros(shape)[index]
        (first_row, last_row, _), (first_column, last_column, _) = (
            each.indices(size) for each, size in zip((*index, ALL, ALL), shape, strict=False)
        )
        top, left = first_row // TILE * TILE, first_column // TILE * TILE
        bottom, right = (
            min(-(-last // TILE) * TILE, size) for last, size in zip((last_row, last_column), shape, strict=True)
        )
        weight = torch.empty(bottom - top, right - left)
        seed_of_name = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")

        def fill(i: int, j: int) -> None:
            tile = weight[i - top : i - top + TILE, j - left : j - left + TILE]
            # torch's CPU generators use 32 bits of a seed. Consecutive seeds make the tiles of a matrix differ.
            number = i // TILE * -(-shape[1] // TILE) + j // TILE
            generator = torch.Generator().manual_seed((seed_of_name + number) % 2**32)
            tile.copy_(torch.normal(0.0, config.initializer_range, tile.shape, generator=generator))

        tiles = itertools.product(range(top, bottom, TILE), range(left, right, TILE))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda corner: fill(*corner), tiles))
        if name.endswith("embed_tokens.weight") and padding is not None and top <= padding < bottom:
            weight[padding - top] = 0.0  # the padding token's embedding is 0 and gets no gradient
        return weight[first_row - top : last_row - top, first_column - left : last_column - left]

    return draw
