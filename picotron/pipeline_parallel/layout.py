"""Which layers a pipeline stage holds. No torch here: anyone can ask."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """What a part of a model takes. Costs compare by time first: memory decides between equals."""

    flops: float  # forward and backward, per token
    parameters: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.parameters + other.parameters)


def balanced_layers(config: "LlamaConfig", num_stages: int, seq_length: int) -> list[range]:
    """The layers of each stage, at least one, such that the slowest stage is as fast as can be: a pipeline runs at its
    pace. The first stage also has the embedding, the last one the head, so they may get fewer layers.

    Args:
        num_stages: at most the number of layers.
        seq_length: of the sequences that the model is trained on; attention takes more time in longer ones.
    """
    D, F, heads_d = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    matrices = 2 * D * heads_d + 2 * D * config.num_key_value_heads * config.head_dim + 3 * D * F
    # 6 FLOPs per parameter that a token is multiplied with; scores and values: Chowdhery et al. 2022, appendix B.
    layer = Cost(6 * matrices + 12 * heads_d * seq_length, matrices)
    vocabulary = config.vocab_size * D
    return _hand_out(config.num_hidden_layers, num_stages, layer, Cost(0, vocabulary), Cost(6 * vocabulary, vocabulary))


def _hand_out(num_layers: int, num_stages: int, layer: Cost, embedding: Cost, head: Cost) -> list[range]:
    """Layers are alike, so it is best to hand out one after the other, each to the stage that is lightest with it."""
    costs = [layer] * num_stages
    costs[0] += embedding
    costs[-1] += head
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        # From the last stage on: between equals the later one, which has fewer micro-batches in flight (1F1B).
        lightest = min(reversed(range(num_stages)), key=lambda stage: costs[stage] + layer)
        costs[lightest] += layer
        counts[lightest] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
