"""From a description of a model on the meta device to weights in memory, of which a rank may hold only a part."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from picotron.model import Llama

Index = tuple[slice, ...]
Value = Callable[[str, torch.Size, Index], Tensor]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a parameter that this tp rank holds: `start` to `stop` of dimension `dim`, then zeros up to `size`.

    A module says so in `shards`, a dict from the names of its parameters; what is not in it is whole. Initial weights,
    checkpoints and the gradient norm read this one fact.
    """

    dim: int
    full_size: int
    start: int
    stop: int
    size: int
    copies: int = 1  # tp ranks that hold this same part

    @property
    def index(self) -> Index:
        return (*[slice(None)] * self.dim, slice(self.start, self.stop))

    def full_shape(self, local: torch.Size) -> torch.Size:
        return torch.Size([*local[: self.dim], self.full_size, *local[self.dim + 1 :]])


def parameters_and_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard | None]]:
    """Every parameter once, with its name and, if it is not whole, its shard."""
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        yield name, parameter, getattr(model.get_submodule(owner), "shards", {}).get(leaf)


def is_copy(model: nn.Module, name: str) -> bool:
    """Is this parameter here because another pipeline stage's layer is used here as well? Then it counts there.

    A module says so in `is_copy`: the embedding on the last stage, whose matrix is the head's too.
    """
    return getattr(model.get_submodule(name.rpartition(".")[0]), "is_copy", False)


def fill(tensor: Tensor, name: str, shard: Shard | None, value: Value) -> None:
    """Copy this rank's part of a parameter, or of what goes with one, into `tensor`; its padding is zeros."""
    if shard is None:
        tensor.copy_(value(name, tensor.shape, ()))
    else:
        part = value(name, shard.full_shape(tensor.shape), shard.index)
        held = shard.stop - shard.start
        tensor.narrow(shard.dim, 0, held).copy_(part)
        tensor.narrow(shard.dim, held, shard.size - held).zero_()


def materialise(model: Llama, device: torch.device, value: Value) -> None:
    """Give every parameter of a model on the meta device its memory.

    Args:
        value: `value(name, shape, index)` is the part `[index]` of the parameter `name`, which has `shape` as a whole.
    """
    for name, parameter, shard in list(parameters_and_shards(model)):
        filled = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        fill(filled, name, shard, value)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(filled))
    model.tie_weights()


def initial_value(config: LlamaConfig, seed: int) -> Value:
    """Initial weights as transformers draws them: normal with std `initializer_range`, biases 0, norms 1.

    Each parameter has its own generator, on the CPU, seeded by (seed, name), and is drawn as a whole: whoever needs a
    part of it gets the same numbers, whatever the layout.
    """

    def draw(name: str, shape: torch.Size, index: Index) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)[index]
        if name.endswith(".bias"):
            return torch.zeros(shape)[index]
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        weight = torch.normal(0.0, config.initializer_range, shape, generator=generator)
        if name.endswith("embed_tokens.weight") and config.pad_token_id is not None:
            weight[config.pad_token_id] = 0.0  # padding is embedded as nothing, and never learns
        return weight[index]

    return draw
