"""Facts about the stages of a pipeline: how many a pp_layout has, and how long each takes. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from picotron.model.flops import part_costs
from picotron.pipeline_parallel.pp_layout import expand
from picotron.pipeline_parallel.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def count_stages(text: str) -> int:
    """Count the stages in a pp_layout. Raises as `parse_stages` does."""
    return expand(text).count("|") + 1


def count_layers(text: str) -> int:
    """Count the layers in a pp_layout. Raises as `parse_stages` does."""
    return expand(text).count("t")


def stage_weights(config: "PreTrainedConfig", stages: Sequence[Stage], seq_length: int, pp: int) -> list[float]:
    """Return the relative times of the stages by their FLOPs, for `simulate.Costs`; the ranks' average is 1.

    `Costs` assumes that W takes as long as I. This is true of matrices, but not of attention, which has no weights.
    """
    layer, embedding, head = (cost.flops for cost in part_costs(config, seq_length))
    flops = [len(stage.layers) * layer + stage.has_embedding * embedding + stage.has_head * head for stage in stages]
    return [pp * each / sum(flops) for each in flops]
