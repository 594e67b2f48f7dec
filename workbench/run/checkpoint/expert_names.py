"""Names of the tensors of experts. Files of the hub have a tensor for each matrix of each expert. A program may have
fused those of a layer, as transformers 5 does in memory, and with `save_original_format=False` in files:

    mlp.experts.3.gate_proj.weight (F, D)    half 0 of mlp.experts.gate_up_proj[3] (E, 2 F, D)
    mlp.experts.3.up_proj.weight (F, D)      half 1 of the same
    mlp.experts.3.down_proj.weight (D, F)    mlp.experts.down_proj[3] (E, D, F)
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from picotron.model.families import differences
from picotron.model.placement import Index

BIAS = "gate.e_score_correction_bias"


class ExpertNames(NamedTuple):
    """Names in a layer: of the block of router and experts, and of the three matrices of an expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_names(family: str) -> ExpertNames:
    """Return the names of a `model_type`."""
    return ExpertNames("block_sparse_moe", "w1", "w3", "w2") if family == "mixtral" else ExpertNames()


class Place(NamedTuple):
    """The place of a tensor in a file with fused tensors: a part of the tensor `name` (rows, columns), which has one or
    two `halves` of each of `experts` experts; or all of it, if that has none.
    """

    name: str
    experts: int = 0
    expert: int = 0
    halves: int = 1
    half: int = 0

    def full_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of the tensor `name`, if that of the part is `shape`."""
        return [self.experts, self.halves * shape[0], shape[1]] if self.experts else list(shape)

    def full_index(self, shape: torch.Size, index: Index) -> Any:
        """Return the index in the tensor `name` of the slice `[index]` of the part."""
        if not self.experts:
            return index or ...
        rows, *columns = index or (slice(None),)
        first, last, _ = rows.indices(shape[0])
        return (self.expert, slice(self.half * shape[0] + first, self.half * shape[0] + last), *columns)


def places(config: PreTrainedConfig) -> dict[str, Place]:
    """Return the tensors of a model's routers and experts by name, with their places in files with fused tensors."""
    experts, names, found = differences(config).experts, expert_names(config.model_type), dict[str, Place]()
    if experts is None:
        return found
    for layer in set(range(config.num_hidden_layers)) - set(experts.dense):
        block, fused, number = f"model.layers.{layer}.{names.block}", f"model.layers.{layer}.mlp", experts.number
        found[f"{block}.gate.weight"] = Place(f"{fused}.gate.weight")
        if experts.scale is not None:
            others = (BIAS, *(f"shared_experts.{matrix}.weight" for matrix in names[1:]))
            found |= {f"{block}.{name}": Place(f"{fused}.{name}") for name in others}
        for i in range(number):
            for half, matrix in enumerate((names.gate, names.up)):
                found[f"{block}.experts.{i}.{matrix}.weight"] = Place(
                    f"{fused}.experts.gate_up_proj", number, i, 2, half
                )
            found[f"{block}.experts.{i}.{names.down}.weight"] = Place(f"{fused}.experts.down_proj", number, i)
    return found


def with_experts(names: Iterable[str], config: PreTrainedConfig) -> set[str]:
    """Return the names of a model's tensors, from those of the model with MLPs in the place of experts."""
    experts = places(config)
    layers = {name.split(".")[2] for name in experts}
    return {*experts, *(name for name in names if ".mlp." not in name or name.split(".")[2] not in layers)}
