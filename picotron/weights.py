"""A rank's weights: which shard of each parameter it holds, how the shards get their values, and their gradients."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig

from picotron.collectives import all_reduce
from picotron.model import Llama

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


def mark_tied_replica(module: nn.Module) -> None:
    """Mark a module whose weight another pipeline stage holds, too, see `is_tied_replica`."""
    module.is_tied_replica = True  # type: ignore[assignment]  # torch's modules take any attribute


def is_tied_replica(model: nn.Module, name: str) -> bool:
    """Whether a parameter is a replica of one that another pipeline stage holds: the tied embedding on the last stage.

    The gradient norm and checkpoints include the original only.
    """
    return getattr(model.get_submodule(name.rpartition(".")[0]), "is_tied_replica", False)


def main_grad(parameter: Tensor) -> Tensor:
    """The buffer in which a parameter's gradients accumulate over micro-batches: its shape, in float32 or wider.

    `DataParallel` allocates and fills it, the optimizer reads it. (The name is Megatron-LM's.)
    """
    return parameter.main_grad  # type: ignore[attr-defined]  # torch's parameters take any attribute


def set_main_grad(parameter: Tensor, buffer: Tensor) -> None:
    """Let `main_grad(parameter)` be `buffer`."""
    parameter.main_grad = buffer  # type: ignore[attr-defined]


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the `main_grad`s of parameters of which several tp ranks hold replicas, but use them in different
    computations: norms and biases with sequence parallelism, and key/value heads that several ranks share.

    A module lists these parameters in a dict `partial_gradients`, each with the group of its replicas. The sum is only
    needed once per step, so the gradients of a group are sent together.
    """
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for module in model.modules():
        for name, group in getattr(module, "partial_gradients", {}).items():
            if (parameter := getattr(module, name)) is not None:  # a layer without bias
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


def materialise(model: Llama, device: torch.device, read: ReadTensor) -> None:
    """Allocate the parameters of a model on the meta device, and fill them with what `read` returns."""
    for name, parameter, shard in list(parameters_and_shards(model)):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        copy_shard(values, name, shard, read)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(values))
    model.tie_weights()


def initial_weights(config: LlamaConfig, seed: int) -> ReadTensor:
    """Return a reader of initial weights with transformers' distribution: normal with standard deviation
    `initializer_range`; biases are 0 and norms 1.

    Each parameter has its own CPU generator, seeded by (seed, name), and is drawn in full. So every rank that needs a
    shard of it gets the same numbers, in any layout.
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
            weight[config.pad_token_id] = 0.0  # the padding token's embedding is 0 and gets no gradient
        return weight[index]

    return draw
