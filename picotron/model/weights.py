"""A rank's weights: which shard of each parameter it holds, how the shards get their values, and their gradients."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron.collectives import all_reduce
from picotron.model.families import differences
from picotron.model.llama import Llama

TILE = 256  # rows and columns of a matrix that are drawn at a time
ALL = slice(None)

Index = tuple[slice, ...]
ReadTensor = Callable[[str, torch.Size, Index], Tensor]
"""`read(name, shape, index)` returns the slice `[index]` of the parameter `name`, whose full shape is `shape`"""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The shard of a parameter on this tp rank: `start` to `stop` of dimension `dim`, padded with zeros to `size`.

    A module lists its shards in a dict `shards`, by the names of its parameters; parameters that are not listed are
    replicated. Initial weights, checkpoints and the gradient norm all read this one description.
    """

    dim: int
    full_size: int
    start: int
    stop: int
    size: int
    replicas: int = 1  # number of tp ranks that hold this same shard

    @property
    def index(self) -> Index:
        return (*[slice(None)] * self.dim, slice(self.start, self.stop))

    def full_shape(self, local: torch.Size) -> torch.Size:
        return torch.Size([*local[: self.dim], self.full_size, *local[self.dim + 1 :]])


def parameters_and_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard | None]]:
    """Iterate over the parameters: (name, parameter, its shard, or None for a replicated parameter)."""
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        yield name, parameter, getattr(model.get_submodule(owner), "shards", {}).get(leaf)


def mark_tied(module: nn.Module, name: str, is_replica: bool) -> None:
    """Mark a parameter of a module that another pipeline stage holds, too, see `is_tied_replica` and
    `tied_parameters`.
    """
    module.tied_replicas = getattr(module, "tied_replicas", {}) | {name: is_replica}  # type: ignore[assignment]


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that another pipeline stage holds, too: the tied embedding on the first and last stage."""
    return {getattr(module, name) for module in model.modules() for name in getattr(module, "tied_replicas", ())}


def is_tied_replica(model: nn.Module, name: str) -> bool:
    """Whether a parameter is a replica of one that another pipeline stage holds: the tied embedding on the last stage.

    The gradient norm and checkpoints include the original only.
    """
    owner, _, leaf = name.rpartition(".")
    is_replica: bool = getattr(model.get_submodule(owner), "tied_replicas", {}).get(leaf, False)
    return is_replica


def main_grad(parameter: Tensor) -> Tensor:
    """The gradient that the optimizer reads: a tensor of the parameter's shape, in float32 or wider, in which gradients
    accumulate over micro-batches; or this rank's slice of it, see `owned_slices`.

    `DataParallel` allocates and fills it. (The name is Megatron-LM's.) A parameter that was frozen before it was
    wrapped, by `requires_grad_(False)`, has none, or 0 with ZeRO-3.
    """
    return parameter.main_grad  # type: ignore[attr-defined]  # torch's parameters take any attribute


def set_main_grad(parameter: Tensor, buffer: Tensor) -> None:
    """Let `main_grad(parameter)` be `buffer`."""
    parameter.main_grad = buffer  # type: ignore[attr-defined]


def scale_gradients(model: nn.Module, factor: Tensor | float) -> None:
    """Multiply the `main_grad`s of all parameters that are not frozen by a factor, in place."""
    gradients = [main_grad(parameter) for parameter in model.parameters() if parameter.requires_grad]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the `main_grad`s of parameters of which several tp ranks hold replicas, but use them in different
    computations: norms and biases with sequence parallelism, and key/value heads that several ranks share.

    A module lists these parameters in a dict `partial_gradients`, each with the group of its replicas. The sum is only
    needed once per step, so the gradients of a group are sent together.
    """
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for module in model.modules():
        for name, group in getattr(module, "partial_gradients", {}).items():
            parameter = getattr(module, name)
            if parameter is not None and parameter.requires_grad:  # not so: a layer without bias, a frozen weight
                by_group.setdefault(group, []).append(main_grad(parameter))
    for group, gradients in by_group.items():
        total = torch.cat([gradient.flatten() for gradient in gradients])
        all_reduce(total, group)
        sums = total.split([gradient.numel() for gradient in gradients])
        for gradient, total_gradient in zip(gradients, sums, strict=True):
            gradient.copy_(total_gradient.view_as(gradient))


def copy_shard(tensor: Tensor, name: str, shard: Shard | None, read: ReadTensor) -> None:
    """Copy this rank's shard of a parameter, or of the optimizer's state for it, into `tensor`. Padding becomes 0."""
    if shard is None:
        tensor.copy_(read(name, tensor.shape, ()))
    else:
        values = read(name, shard.full_shape(tensor.shape), shard.index)
        held = shard.stop - shard.start
        tensor.narrow(shard.dim, 0, held).copy_(values)
        tensor.narrow(shard.dim, held, shard.size - held).zero_()


def materialise(model: Llama, device: torch.device, read: ReadTensor | None) -> None:
    """Allocate the parameters of a model on the meta device, and fill them with what `read` returns.

    Args:
        read: None leaves the parameters without memory.
    """
    for name, parameter, shard in list(parameters_and_shards(model)):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if read is None:
            values.untyped_storage().resize_(0)
        else:
            copy_shard(values, name, shard, read)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(values))
    model.tie_weights()


def initial_weights(config: PreTrainedConfig, seed: int) -> ReadTensor:
    """Return a reader of initial weights with transformers' distribution: normal with standard deviation
    `initializer_range`; biases are 0, and norms multiply by 1.

    A matrix consists of tiles of TILE rows and columns. Each tile has its own CPU generator, seeded by (seed, name,
    number of the tile), and a rank draws only the tiles that its shard overlaps. So the numbers do not depend on the
    layout.
    """
    padding = None if config.pad_token_id is None else config.pad_token_id % config.vocab_size  # -1: the last row

    def draw(name: str, shape: torch.Size, index: Index) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(shape, 1.0 - differences(config).norm_offset)[index]
        if name.endswith(".bias"):
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
        for i, j in itertools.product(range(top, bottom, TILE), range(left, right, TILE)):
            tile = weight[i - top : i - top + TILE, j - left : j - left + TILE]
            # torch's CPU generators use 32 bits of a seed. Consecutive seeds make the tiles of a matrix differ.
            number = i // TILE * -(-shape[1] // TILE) + j // TILE
            generator = torch.Generator().manual_seed((seed_of_name + number) % 2**32)
            tile.copy_(torch.normal(0.0, config.initializer_range, tile.shape, generator=generator))
        if name.endswith("embed_tokens.weight") and padding is not None and top <= padding < bottom:
            weight[padding - top] = 0.0  # the padding token's embedding is 0 and gets no gradient
        return weight[first_row - top : last_row - top, first_column - left : last_column - left]

    return draw
