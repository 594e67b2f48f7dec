"""Names of experts: transformers 5 fuses the matrices of a layer's experts, and files of the hub have one of each."""

from collections.abc import Collection, Mapping

from torch import Tensor

NAMES = {".mlp.": ("gate_proj", "up_proj", "down_proj"), ".block_sparse_moe.": ("w1", "w3", "w2")}


def hub_tensors(tensors: Mapping[str, Tensor], is_mixtral: bool) -> dict[str, Tensor]:
    """Return views of a model's tensors by their names in files of the hub: `experts.gate_up_proj` (E, 2 F, D) becomes
    `experts.3.gate_proj.weight` (F, D) and so on. Tensors that are not fused keep their names.
    """
    block = list(NAMES)[is_mixtral]
    gate, up, down = NAMES[block]
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", block)
        experts, _, matrix = name.rpartition(".")
        if matrix == "gate_up_proj":
            for number, both in enumerate(tensor):
                found[f"{experts}.{number}.{gate}.weight"], found[f"{experts}.{number}.{up}.weight"] = both.chunk(2)
        elif matrix == "down_proj":
            found |= {f"{experts}.{number}.{down}.weight": each for number, each in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def named_as(names: Collection[str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names of the hub, see `hub_tensors`, if `names` are such names of experts."""
    if not any(".experts." in name and name.endswith(".weight") for name in names):
        return tensors
    return hub_tensors(tensors, any(".block_sparse_moe." in name for name in names))
