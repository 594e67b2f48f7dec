"""The layers of each pp rank as a table. No torch, so that a browser can use it."""

from collections.abc import Sequence

from picotron.pipeline_parallel.stages import Stage
from workbench.console import text_table


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
