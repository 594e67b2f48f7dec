"""Parameters and FLOPs of the parts of a Llama: a decoder layer, the embedding, and the head with the last norm;
and the peak FLOP/s of devices, to which MFU refers."""

import dataclasses
from typing import TYPE_CHECKING

from picotron.model.families import differences, head_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """The cost of a part of a model. Costs compare by FLOPs first, and by parameters if the FLOPs are equal."""

    flops: int  # forward and backward, per token
    parameters: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.parameters + other.parameters)


def part_parameters(config: "PreTrainedConfig", tp_size: int = 1) -> tuple[int, int, int]:
    """Number of parameters of a layer, of the embedding and of the head on one tp rank.

    Norms and the biases of row-parallel layers are replicated on the tp ranks. With fewer key/value heads than ranks,
    each rank holds one head. A vocabulary that tp_size does not divide is padded.
    """
    D, F = config.hidden_size, config.intermediate_size // tp_size
    d, differs = head_size(config), differences(config)
    queries = config.num_attention_heads // tp_size * d
    kv = max(1, config.num_key_value_heads // tp_size) * d
    matrices = D * (2 * queries + 2 * kv + 3 * F)
    biases = (queries + 2 * kv) * differs.qkv_bias + D * differs.o_bias + (2 * F + D) * differs.mlp_bias
    norms = {None: 0, "head": 2 * d, "all heads": queries + kv}[differs.qk_norm] + 2 * D
    vocabulary = -(-config.vocab_size // tp_size) * D
    return matrices + biases + norms, vocabulary, vocabulary + D


def part_costs(config: "PreTrainedConfig", seq_length: int) -> tuple[Cost, Cost, Cost]:
    """The costs of a layer, of the embedding and of the head.

    A token takes 6 FLOPs, forward and backward, for each parameter that it is multiplied with, and 12 H d T for the
    attention scores and values of a layer, for sequences of T tokens (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B). Recomputed activations do not count.
    """
    layer, embedding, head = part_parameters(config)
    attention = 12 * config.num_attention_heads * head_size(config) * seq_length
    return Cost(6 * layer + attention, layer), Cost(0, embedding), Cost(6 * head, head)


def model_cost(config: "PreTrainedConfig", seq_length: int) -> Cost:
    """The cost of the full model. A tied matrix counts once among the parameters; as the head, it takes FLOPs, too."""
    layer, embedding, head = part_costs(config, seq_length)
    flops = config.num_hidden_layers * layer.flops + head.flops
    parameters = config.num_hidden_layers * layer.parameters + embedding.parameters + head.parameters
    return Cost(flops, parameters - bool(config.tie_word_embeddings) * embedding.parameters)


# Peak dense bfloat16 FLOP/s from the vendors' data sheets. The first of these names that occurs in a device's name
# counts, so specific names precede general ones.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}
