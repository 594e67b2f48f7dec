"""Pipeline stages: the layers that each stage of a pipeline holds. No torch.

Stages can be written as text, in the notation of Megatron-LM's `--pipeline-model-parallel-layout`: E is the embedding,
t a (transformer) layer, L the head with its loss, and | a boundary between two stages. x*n repeats x n times, where x
is one of these or a group in parentheses. Commas and spaces are ignored. An empty stage passes its input on. But the
first stage reads the tokens and the last one computes the loss, so if they are empty, they get the E and the L.

    Et*3|(tt|)*5L       seven stages: the embedding and three layers, five times two layers, the head alone

A pipeline has one stage on each rank. Those of the workbench can have several, the chunks of the rank.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from picotron.console import UserError, text_table
from picotron.model.flops import Cost, part_costs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config

MAX_SYMBOLS = 10_000  # in one repetition of a pp_layout, written out


@dataclasses.dataclass(frozen=True)
class Stage:
    """The contents of a stage: numbers of layers, in order. Prints in the notation above."""

    layers: Sequence[int]
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        return "E" * self.has_embedding + "t" * len(self.layers) + "L" * self.has_head


def stages_for(config: "Config", model_config: "PreTrainedConfig", ranks: Sequence[int]) -> list[Stage]:
    """Return the stages of a config's pp_layout, or the balanced ones.

    Args:
        ranks: the rank of each stage.

    Raises:
        UserError: the stages do not fit the model, or a rank would hold nothing.
    """
    layout = config.distributed.pp_layout
    if layout is None:
        return balanced_stages(model_config, config.training.seq_length, ranks)
    stages = parse_stages(layout, model_config.num_hidden_layers, len(ranks))
    for rank in sorted(set(ranks)):
        if not any(str(stage) for stage, other in zip(stages, ranks, strict=True) if other == rank):
            raise UserError(
                f"pp_layout={layout!r} gives pp rank {rank} nothing; give it a layer, the embedding or the head"
            )
    return stages


def balanced_layers(
    config: "PreTrainedConfig", num_stages: int, seq_length: int, ranks: Sequence[int] | None = None
) -> list[range]:
    """Assign at least one layer to each stage, such that the slowest rank, which sets the pace of the pipeline, is as
    fast as possible. The first stage also has the embedding, and the last one the head, so they may get fewer layers.

    Args:
        num_stages: number of stages, at most the number of layers.
        seq_length: tokens per sequence, see `part_costs`.
        ranks: the rank of each stage; by default every stage has a separate rank.
    """
    return _assign_layers(config.num_hidden_layers, num_stages, *part_costs(config, seq_length), ranks)


def _assign_layers(
    num_layers: int, num_stages: int, layer: Cost, embedding: Cost, head: Cost, ranks: Sequence[int] | None = None
) -> list[range]:
    """Assign one layer after the other, each to the rank whose cost including that layer is lowest, and on this rank to
    the stage of lowest cost. This is optimal because all layers cost the same.
    """
    ranks = range(num_stages) if ranks is None else ranks
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
            f"but num_hidden_layers={config.num_hidden_layers}; use a smaller pp_size or pp_chunks, or a pp_layout with empty stages"
        )
    layers = balanced_layers(config, num_stages, seq_length, ranks)
    return [Stage(each, i == 0, i == num_stages - 1) for i, each in enumerate(layers)]


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
    groups = [""]  # the expanded text so far, then that of each open group
    last = ""  # the text that a * would repeat
    for match in re.finditer(r"\*([0-9]{0,9})|.", text, re.DOTALL):
        token, times = match[0], int(match[1] or 0)
        if token in "EtmL|":
            last = token
            groups[-1] += last
        elif token == "(":
            groups.append("")
            last = ""
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif times > 0 and last and times * len(last) <= MAX_SYMBOLS:
            groups[-1] += last * (times - 1)
            last = ""
        elif token not in ", ":
            raise UserError(
                f"cannot parse pp_layout={text!r} at character {match.start() + 1}, {token!r}; expected E, t, L, |, "
                f"( or ), or *n after what it repeats, with n at least 1; a repetition has up to {MAX_SYMBOLS} symbols"
            )
    if len(groups) > 1:
        raise UserError(f"pp_layout={text!r} lacks {len(groups) - 1} closing parentheses at its end")
    return groups[0]


def format_stages(stages: Sequence[Stage], ranks: Sequence[int]) -> str:
    """Return a table of the layers of each rank, given the rank of each stage."""
    held = {rank: [stage for stage in range(len(stages)) if ranks[stage] == rank] for rank in sorted(set(ranks))}
    rows = [["", *(f"chunk {chunk}" for chunk in range(len(held[0])))]]
    for rank, numbers in held.items():
        rows.append([f"pp {rank}", *(f"stage {stage}: {_contents(stages[stage])}" for stage in numbers)])
    return text_table(rows)


def _contents(stage: Stage) -> str:
    parts = ["embedding"] if stage.has_embedding else []
    if len(stage.layers) == 1:
        parts.append(f"layer {stage.layers[0]}")
    elif stage.layers:
        parts.append(f"layers {stage.layers[0]}-{stage.layers[-1]}")
    if stage.has_head:
        parts.append("head")
    return ", ".join(parts) or "nothing"
