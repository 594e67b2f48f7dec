"""Pipeline stages: the layers that each stage of a pipeline holds. No torch.

A pipeline has one stage on each rank. Those of the workbench can have several, the chunks of the rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from picotron.console import UserError
from picotron.model.families import Cost, part_costs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config


@dataclasses.dataclass(frozen=True)
class Stage:
    """The contents of a stage: numbers of layers, in order. Prints as `Ett`: embedding, two layers; `L` is the head."""

    layers: Sequence[int]
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        return "E" * self.has_embedding + "t" * len(self.layers) + "L" * self.has_head


def balanced_layers(num_layers: int, ranks: Sequence[int], layer: Cost, embedding: Cost, head: Cost) -> list[range]:
    """Assign at least one layer to each stage, such that the slowest rank, which sets the pace of the pipeline, is as
    fast as possible. The first stage also has the embedding, and the last one the head, so they may get fewer layers.

    One layer after the other goes to the rank whose cost including that layer is lowest, and on this rank to the stage
    of lowest cost. This is optimal because all layers cost the same.

    Args:
        num_layers: number of layers, at least one for each stage.
        ranks: the rank of each stage.
        layer, embedding, head: costs of the parts, see `part_costs`.
    """
    num_stages = len(ranks)
    costs = [layer] * num_stages
    costs[0] += embedding
    costs[-1] += head
    counts = [1] * num_stages

    def with_one_more(stage: int) -> tuple[Cost, Cost]:
        costs_of_rank = [costs[other] for other in range(num_stages) if ranks[other] == ranks[stage]]
        return sum(costs_of_rank, layer), costs[stage] + layer

    for _ in range(num_layers - num_stages):
        # Reversed, so that ties go to the later stage, which has fewer micro-batches in flight (1F1B).
        lightest = min(reversed(range(num_stages)), key=with_one_more)
        costs[lightest] += layer
        counts[lightest] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def balanced_stages(config: "PreTrainedConfig", seq_length: int, ranks: Sequence[int]) -> list[Stage]:
    """Return the default stages of a model, see `balanced_layers`.

    Args:
        ranks: the rank of each stage.

    Raises:
        UserError: there are fewer layers than stages.
    """
    num_stages, pp = len(ranks), len(set(ranks))
    if config.num_hidden_layers < num_stages:
        raise UserError(
            f"pp_size={pp} with {num_stages // pp} chunk(s) per pp rank needs at least {num_stages} layers, one per stage, "
            f"but num_hidden_layers={config.num_hidden_layers}; use a smaller pp_size or pp_chunks, or a pp_layout in which some stages have no layer"
        )
    layers = balanced_layers(config.num_hidden_layers, ranks, *part_costs(config, seq_length))
    return [Stage(each, i == 0, i == num_stages - 1) for i, each in enumerate(layers)]


def plan_stages(config: "Config", model_config: "PreTrainedConfig") -> list[Stage]:
    """Return the stages of a config's pipeline, one on each pp rank. Raises a UserError as `balanced_stages`."""
    return balanced_stages(model_config, config.training.seq_length, range(config.distributed.pp_size))
