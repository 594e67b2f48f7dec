"""Pipeline stages: the layers that each stage of a pipeline holds. No torch.

Stages can be written as text, in the notation of Megatron-LM's `--pipeline-model-parallel-layout`: E is the embedding,
t a (transformer) layer, L the head with its loss, and | a boundary between two stages. x*n repeats x n times, where x
is one of these or a group in parentheses. Commas and spaces are ignored. An empty stage passes its input on. But the
first stage reads the tokens and the last one computes the loss, so if they are empty, they get the E and the L.

    Et*3|(tt|)*5L       seven stages: the embedding and three layers, five times two layers, the head alone

With several chunks per rank, the stages of chunk 0 on all ranks come first, then those of chunk 1, ..., see
`actions.rank_of`.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from picotron.console import UserError, text_table
from picotron.model.flops import Cost, part_costs
from picotron.schedules.actions import Placement, rank_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_SYMBOLS = 10_000  # in one repetition of a pp_layout, written out


@dataclasses.dataclass(frozen=True)
class Stage:
    """The contents of a stage. Prints in the notation above."""

    layers: range
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        return "E" * self.has_embedding + "t" * len(self.layers) + "L" * self.has_head


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


def balanced_stages(
    config: "PreTrainedConfig", seq_length: int, pp: int, chunks: int = 1, placement: Placement = "loop"
) -> list[Stage]:
    """Return the default stages of a model, see `balanced_layers`.

    Raises:
        UserError: there are fewer layers than stages.
    """
    num_stages = pp * chunks
    if config.num_hidden_layers < num_stages:
        raise UserError(
            f"pp_size={pp} with {chunks} chunk(s) per pp rank needs at least {num_stages} layers, one per stage, but "
            f"num_hidden_layers={config.num_hidden_layers}; use fewer stages, or a pp_layout with empty ones"
        )
    ranks = [rank_of(stage, pp, placement) for stage in range(num_stages)]
    layers = balanced_layers(config, num_stages, seq_length, ranks)
    return [Stage(each, i == 0, i == num_stages - 1) for i, each in enumerate(layers)]


def count_stages(text: str) -> int:
    """Count the stages in text in the notation above. Raises as `parse_stages` does."""
    return _expand(text).count("|") + 1


def count_layers(text: str) -> int:
    """Count the layers in text in the notation above. Raises as `parse_stages` does."""
    return _expand(text).count("t")


def parse_stages(text: str, num_layers: int, num_stages: int) -> list[Stage]:
    """Parse stages that are written in the notation above.

    Raises:
        UserError: the text is not in that notation, or does not fit the model or the number of stages.
    """
    symbols = _expand(text)
    stages = symbols.split("|")
    if "m" in symbols:
        why = "has m (multi-token prediction), which these models do not support; remove it"
    elif len(stages) != num_stages:
        why = f"has {len(stages)} stages, but the schedule has {num_stages} (pp ranks times chunks); write as many"
    elif symbols.count("t") != num_layers:
        why = f"has {symbols.count('t')} layers (t), but the model has {num_layers}; write as many"
    elif symbols.count("E") != 1 or symbols.strip("|")[0] != "E":
        why = f"has {symbols.count('E')} E; it must begin with its only E, because the first stage reads the tokens"
    elif symbols.count("L") != 1 or symbols.strip("|")[-1] != "L":
        why = f"has {symbols.count('L')} L; it must end with its only L, because the last stage computes the loss"
    else:
        ends = list(itertools.accumulate(stage.count("t") for stage in stages))
        layers = [range(end - stage.count("t"), end) for stage, end in zip(stages, ends, strict=True)]
        return [Stage(each, i == 0, i == num_stages - 1) for i, each in enumerate(layers)]
    raise UserError(f"pp_layout={text!r} {why}")


def _expand(text: str) -> str:
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


def format_stages(stages: Sequence[Stage], pp: int, placement: Placement = "loop") -> str:
    """Return a table of the layers of each rank in each chunk."""
    rows = [["", *(f"chunk {chunk}" for chunk in range(len(stages) // pp))]]
    for rank in range(pp):
        held = [stage for stage in range(len(stages)) if rank_of(stage, pp, placement) == rank]
        rows.append([f"pp {rank}", *(f"stage {stage}: {_contents(stages[stage])}" for stage in held)])
    return text_table(rows)


def _contents(stage: Stage) -> str:
    first, last = stage.layers.start, stage.layers.stop - 1
    layers = {0: "", 1: f"layer {first}"}.get(len(stage.layers), f"layers {first}-{last}")
    parts = ["embedding" * stage.has_embedding, layers, "head" * stage.has_head]
    return ", ".join(filter(None, parts)) or "nothing"


def stage_weights(config: "PreTrainedConfig", stages: Sequence[Stage], seq_length: int, pp: int) -> list[float]:
    """Return the relative times of the stages by their FLOPs, for `simulate.Costs`; the ranks' average is 1.

    `Costs` assumes that W takes as long as I. This is true of matrices, but not of attention, which has no weights.
    """
    layer, embedding, head = (cost.flops for cost in part_costs(config, seq_length))
    flops = [len(stage.layers) * layer + stage.has_embedding * embedding + stage.has_head * head for stage in stages]
    return [pp * each / sum(flops) for each in flops]
