"""Which layers a pipeline stage holds. No torch here: anyone can ask.

A layout can be written as text, in the notation of Megatron-LM's `--pipeline-model-parallel-layout`: E is the
embedding, t a (transformer) layer, L the head with its loss, and | stands between two stages. x*n is n times x, where x
is one of these or a group in parentheses. Commas and spaces mean nothing. An empty stage passes on what it gets.

    Et*3|(tt|)*5L       seven stages: the embedding and three layers, five times two layers, the head alone

With several chunks per rank, the stages are those of chunk 0 on all ranks, then those of chunk 1, ..., see
`actions.rank_of`.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from picotron.errors import UserError
from picotron.schedules.actions import Placement, rank_of
from picotron.schedules.costs import Cost, part_costs
from picotron.text_table import text_table

if TYPE_CHECKING:
    from transformers import LlamaConfig

MAX_PARTS = 10_000  # of a layout that is written as text


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a stage holds. Prints in the notation above."""

    layers: range
    has_embedding: bool = False
    has_head: bool = False

    def __str__(self) -> str:
        return "E" * self.has_embedding + "t" * len(self.layers) + "L" * self.has_head


def balanced_layers(
    config: "LlamaConfig", num_stages: int, seq_length: int, ranks: Sequence[int] | None = None
) -> list[range]:
    """The layers of each stage, at least one, such that the slowest rank is as fast as can be: a pipeline runs at its
    pace. The first stage also has the embedding, the last one the head, so they may get fewer layers.

    Args:
        num_stages: at most the number of layers.
        seq_length: see `part_costs`.
        ranks: of each stage; by default every stage has a rank of its own.
    """
    return _assign_layers(config.num_hidden_layers, num_stages, *part_costs(config, seq_length), ranks)


def _assign_layers(
    num_layers: int, num_stages: int, layer: Cost, embedding: Cost, head: Cost, ranks: Sequence[int] | None = None
) -> list[range]:
    """Layers are alike, so it is best to hand out one after the other, each to the rank that is lightest with it, and
    there to its lightest stage.
    """
    ranks = range(num_stages) if ranks is None else ranks
    costs = [layer] * num_stages
    costs[0] += embedding
    costs[-1] += head
    counts = [1] * num_stages

    def with_one_more(stage: int) -> tuple[Cost, Cost]:
        whole_rank = [costs[other] for other in range(num_stages) if ranks[other] == ranks[stage]]
        return sum(whole_rank, layer), costs[stage] + layer

    for _ in range(num_layers - num_stages):
        # From the last stage on: between equals the later one, which has fewer micro-batches in flight (1F1B).
        lightest = min(reversed(range(num_stages)), key=with_one_more)
        costs[lightest] += layer
        counts[lightest] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def balanced_stages(
    config: "LlamaConfig", seq_length: int, pp: int, chunks: int = 1, placement: Placement = "loop"
) -> list[Stage]:
    """The layout of a model for which none is given, see `balanced_layers`.

    Raises:
        UserError: there are fewer layers than stages.
    """
    num_stages = pp * chunks
    if config.num_hidden_layers < num_stages:
        raise UserError(
            f"pp_size={pp} ranks with {chunks} chunks each make {num_stages} stages, which need a layer each, but "
            f"num_hidden_layers={config.num_hidden_layers}; use fewer, or a layout with empty stages"
        )
    ranks = [rank_of(stage, pp, placement) for stage in range(num_stages)]
    layers = balanced_layers(config, num_stages, seq_length, ranks)
    return [Stage(each, i == 0, i == num_stages - 1) for i, each in enumerate(layers)]


def parse_stages(text: str, num_layers: int, num_stages: int) -> list[Stage]:
    """The stages of a layout that is written as above.

    Raises:
        UserError: the text is not in that notation, or does not fit the model or the number of stages.
    """
    parts = _expand(text)
    stages = parts.split("|")
    if "m" in parts:
        why = "has m, multi-token prediction, which these models do not have; leave it out"
    elif len(stages) != num_stages:
        why = f"has {len(stages)} stages, but ranks times chunks are {num_stages}"
    elif parts.count("t") != num_layers:
        why = f"has {parts.count('t')} layers (t), but the model has {num_layers}"
    elif parts.count("E") != 1 or parts[0] != "E":
        why = f"has {parts.count('E')} E; it must have one, at its very beginning, as the first stage reads the tokens"
    elif parts.count("L") != 1 or parts[-1] != "L":
        why = f"has {parts.count('L')} L; it must have one, at its very end, as the last stage computes the loss"
    else:
        ends = list(itertools.accumulate(stage.count("t") for stage in stages))
        layers = [range(end - stage.count("t"), end) for stage, end in zip(stages, ends, strict=True)]
        return [Stage(each, "E" in stage, "L" in stage) for stage, each in zip(stages, layers, strict=True)]
    raise UserError(f"pp_layout={text!r} {why}")


def _expand(text: str) -> str:
    """A layout without repetitions, groups and what means nothing: `E,(t|)*2L` is `Et|t|L`."""
    groups = [""]  # what has been read of the text, and of each group that is still open in it
    last = ""  # what a * would repeat
    for found in re.finditer(r"\*([0-9]{0,9})|.", text, re.DOTALL):
        token, times = found[0], int(found[1] or 0)
        if token in "EtmL|":
            last = token
            groups[-1] += last
        elif token == "(":
            groups.append("")
            last = ""
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif times > 0 and last and times * len(last) <= MAX_PARTS:
            groups[-1] += last * (times - 1)
            last = ""
        elif token not in ", ":
            raise UserError(
                f"cannot parse pp_layout={text!r} at character {found.start() + 1}, {token!r}; expected E, t, L, |, "
                f"( and ), and *n behind what is to be repeated, with n from 1 and at most {MAX_PARTS} parts in all"
            )
    if len(groups) > 1:
        raise UserError(f"pp_layout={text!r} lacks {len(groups) - 1} closing parentheses at its end")
    return groups[0]


def format_stages(stages: Sequence[Stage], pp: int, placement: Placement = "loop") -> str:
    """A table of what each rank holds in each chunk."""
    rows = [["", *(f"chunk {chunk}" for chunk in range(len(stages) // pp))]]
    for rank in range(pp):
        mine = [stage for stage in range(len(stages)) if rank_of(stage, pp, placement) == rank]
        rows.append([f"pp {rank}", *(f"stage {stage}: {_contents(stages[stage])}" for stage in mine)])
    return text_table(rows)


def _contents(stage: Stage) -> str:
    first, last = stage.layers.start, stage.layers.stop - 1
    layers = {0: "", 1: f"layer {first}"}.get(len(stage.layers), f"layers {first}-{last}")
    parts = ["embedding" * stage.has_embedding, layers, "head" * stage.has_head]
    return ", ".join(filter(None, parts)) or "nothing"


def stage_weights(config: "LlamaConfig", stages: Sequence[Stage], seq_length: int, pp: int) -> list[float]:
    """How long the stages take by their FLOPs, for `simulate.Costs`, in units of the average rank's time. (That a
    weight's gradient takes as long as an activation's is true of matrices, but not of attention, which has no weights.)
    """
    layer, embedding, head = (cost.flops for cost in part_costs(config, seq_length))
    flops = [len(stage.layers) * layer + stage.has_embedding * embedding + stage.has_head * head for stage in stages]
    return [pp * each / sum(flops) for each in flops]
