"""Pipeline stages written as text (`schedule.pp_layout`), and how long each takes. No torch.

The notation is that of Megatron-LM's `--pipeline-model-parallel-layout`. E is the embedding, t a (transformer) layer, L
the head with its loss, and | a boundary between two stages. x*n repeats x n times, where x is one of these or a group
in parentheses. Commas and spaces are ignored. An empty stage passes its input on. But the first stage reads the tokens
and the last one computes the loss, so if they are empty, they get the E and the L.

    Et*3|(tt|)*5L       seven stages: the embedding and three layers, five times two layers, the head alone
"""

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from picotron.console import UserError
from picotron.model.families import part_costs
from picotron.pipeline_parallel.stages import Stage, balanced_stages

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config

MAX_SYMBOLS = 10_000  # in one repetition of a pp_layout, written out
REPEATED = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|])(?=\*))(?:\*([0-9]{1,9}))?(?![0-9*])")


def stages_for(config: "Config", model_config: "PreTrainedConfig", ranks: Sequence[int]) -> list[Stage]:
    """Return the stages of a config's pp_layout, or the balanced ones.

    Args:
        ranks: the rank of each stage.

    Raises:
        UserError: the stages do not fit the model, or a rank would hold nothing.
    """
    layout = config.schedule.pp_layout
    if layout is None:
        return balanced_stages(model_config, config.training.seq_length, ranks)
    stages = parse_stages(layout, model_config.num_hidden_layers, len(ranks))
    for rank in sorted(set(ranks)):
        if not any(str(stage) for stage, other in zip(stages, ranks, strict=True) if other == rank):
            raise UserError(
                f"pp_layout={layout!r} gives pp rank {rank} nothing; give it a layer, the embedding or the head"
            )
    return stages


def parse_stages(text: str, num_layers: int, num_stages: int) -> list[Stage]:
    """Parse stages that are written in the notation above.

    Raises:
        UserError: the text is not in that notation, or does not fit the model or the number of stages.
    """
    symbols = expand(text)
    stages = symbols.split("|")
    if "m" in symbols:
        why = "has m (multi-token prediction), which these models do not support; remove it"
    elif len(stages) != num_stages:
        why = f"has {len(stages)} stages, but pp_size times pp_chunks (of pp_engine) is {num_stages}; write as many"
    elif symbols.count("t") != num_layers:
        why = f"has {symbols.count('t')} layers (t), but num_hidden_layers={num_layers}; write as many"
    elif symbols.count("E") != 1 or symbols.strip("|")[0] != "E":
        why = f"has {symbols.count('E')} E; it must begin with its only E, because the first stage reads the tokens"
    elif symbols.count("L") != 1 or symbols.strip("|")[-1] != "L":
        why = f"has {symbols.count('L')} L; it must end with its only L, because the last stage computes the loss"
    else:
        ends = list(itertools.accumulate(stage.count("t") for stage in stages))
        layers = [range(end - stage.count("t"), end) for stage, end in zip(stages, ends, strict=True)]
        return [Stage(each, i == 0, i == num_stages - 1) for i, each in enumerate(layers)]
    raise UserError(f"pp_layout={text!r} {why}")


def expand(text: str) -> str:
    """Write out repetitions and groups, and drop commas and spaces: `E,(t|)*2L` is `Et|t|L`."""
    expanded = re.sub("[, ]", "", text)
    while match := REPEATED.search(expanded):  # the first group without a group inside, or a repeated symbol
        group, symbol, times = match.groups()
        part = group or symbol or ""
        written = part * int(times or 1)
        if not 0 < len(written) <= MAX_SYMBOLS:
            raise UserError(
                f"pp_layout={text!r} repeats {part[:9]!r} {times or 1} times; use 1 to {MAX_SYMBOLS} symbols"
            )
        expanded = expanded[: match.start()] + written + expanded[match.end() :]
    if wrong := re.search("[^EtmL|].*", expanded, re.DOTALL):
        raise UserError(
            f"cannot parse pp_layout={text!r} from {wrong[0][:9]!r} on; expected E, t, L, |, a group in parentheses, or *n "
            f"after what it repeats"
        )
    return expanded


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
