"""Names of the tensors of experts: files of the hub have a tensor for each matrix of each expert."""

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedConfig

from picotron.model.families import differences

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


def with_experts(names: Iterable[str], config: PreTrainedConfig) -> set[str]:
    """Return the names of a model's tensors, from those of the model with MLPs in the place of experts."""
    experts, theirs, found = differences(config).experts, expert_names(config.model_type), {*names}
    if experts is None:
        return found
    for layer in set(range(config.num_hidden_layers)) - set(experts.dense):
        tensors = [f"experts.{i}.{matrix}.weight" for i in range(experts.number) for matrix in theirs[1:]]
        if experts.scale is not None:
            tensors += [BIAS, *(f"shared_experts.{matrix}.weight" for matrix in theirs[1:])]
        found -= {f"model.layers.{layer}.mlp.{matrix}.weight" for matrix in ExpertNames()[1:]}
        found |= {f"model.layers.{layer}.{theirs.block}.{tensor}" for tensor in ("gate.weight", *tensors)}
    return found
