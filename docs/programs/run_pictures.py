"""Pictures of ranks: what those of the quickstart hold and exchange, and what each axis splits.

    python -m docs.programs.run_pictures overview --out docs/pictures/overview.svg

Each rank's coordinates, stages and heads are those of the code that trains.
"""

import itertools

from docs.programs.quickstart import quickstart, stage_of
from docs.programs.svg import LINE, RANKS, WIDTH, Svg, main
from picotron import process_group_manager as pgm
from picotron.config_reader import load_config
from picotron.model.model_config import load_model_config
from picotron.model.placement import placement
from picotron.pipeline_parallel.pp_layout import Stage
from workbench.drawing.draw_svg import lighter
from workbench.explain.fake_group import fake_rank
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.layouts import stage_weights
from workbench.pipelines.modules import LlamaStages
from workbench.schedules.simulate import Costs, simulate


def contents(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    layers = f"layers {first}-{last}" if first < last else f"layer {first}"
    return "embedding, " * stage.has_embedding + layers + ", head" * stage.has_head


def held_heads(stage: LlamaStages) -> str:
    """Return the attention heads of this rank."""
    config = stage.module.config
    parameters = stage.module.named_parameters()
    shard = next(placement(parameter).shard for name, parameter in parameters if name.endswith("q_proj.weight"))
    heads = range(config.num_attention_heads)
    if shard is not None:
        heads = range(shard.start // config.head_dim, shard.stop // config.head_dim)
    return f"heads {heads[0]}-{heads[-1]}"


def following(grid: pgm.ProcessGroupManager, axis: str) -> list[int]:
    """Return the next rank of a rank's group along an axis; no rank for the last one."""
    ranks = {"tp": grid.tp_group_ids, "cp": grid.cp_group_ids, "pp": grid.pp_group_ids, "dp": grid.dp_group_ids}[axis]
    place = ranks.index(grid.global_rank) + 1
    return ranks[place : place + 1]


def overview() -> str:
    """Draw what the ranks of the quickstart hold and exchange, and the schedule of one of its pipelines."""
    config = load_config(["--config", "template/base_config.json"])
    layout, model_config = config.distributed, load_model_config(config.model)
    plan = plan_pipeline(config, model_config)
    dp, pp, tp = layout.dp_size, layout.pp_size, layout.tp_size
    box, width, stage_gap, tp_gap, dp_gap, left, top = 46, 198, 28, 26, 32, 62, 66
    pipeline = tp * box + (tp - 1) * tp_gap
    right = left + pp * width + (pp - 1) * stage_gap + 52  # where the schedule begins
    picture = Svg(WIDTH, top + dp * pipeline + (dp - 1) * dp_gap + 12)
    picture.text(0, 16, f"{layout.world_size} ranks: dp {dp} x pp {pp} x cp {layout.cp_size} x tp {tp}", "title")
    places: dict[int, tuple[float, float]] = {}  # the upper left corner of each rank's box
    for rank, (d, p, t) in enumerate(itertools.product(range(dp), range(pp), range(tp))):
        places[rank] = left + p * (width + stage_gap), top + d * (pipeline + dp_gap) + t * (box + tp_gap)

    for rank, (x, y) in places.items():
        with fake_rank(rank, layout):
            stage, grid = stage_of(config), pgm.process_group_manager
        lines = [f"rank {rank}: {held_heads(stage)}", ", then ".join(map(contents, stage.stages.values()))]
        picture.box(x, y, width, box, lighter(RANKS[grid.pp_rank], 0.5 * grid.tp_rank / tp), title=", ".join(lines))
        for i, line in enumerate(lines):
            picture.text(x + width / 2, y + 18 + 19 * i, line, "label")
        if grid.dp_rank == 0 and grid.tp_rank == 0:
            picture.text(x + width / 2, top - 10, f"pp {grid.pp_rank}", "centred")
        if grid.pp_rank == 0 and grid.tp_rank == 0:
            picture.text(0, y + pipeline / 2 + 6, f"dp {grid.dp_rank}")
        for other in following(grid, "tp"):
            title = f"tp: ranks {rank} and {other}"
            picture.arrow(x + 12, y + box + 3, x + 12, places[other][1] - 3, double=True, title=title)
            picture.text(x + 24, y + box + tp_gap / 2 + 5, "tp: partial results")
        for other in following(grid, "pp"):
            title = f"pp: ranks {rank} and {other}"
            picture.arrow(x + width + 3, y + box / 2, places[other][0] - 3, y + box / 2, double=True, title=title)
        for other in following(grid, "dp"):  # around the other boxes of the column
            side, out = (
                (x - 3, x - 9 - 9 * grid.tp_rank)
                if grid.pp_rank == 0
                else (x + width + 3, x + width + 9 + 9 * grid.tp_rank)
            )
            bottom = places[other][1] + box / 2 + 9
            title = f"dp: ranks {rank} and {other}"
            picture.arrow(
                side, y + box / 2 + 9, out, y + box / 2 + 9, out, bottom, side, bottom, double=True, title=title
            )
            if grid.tp_rank == tp - 1:
                picture.text(x + 24, y + box + dp_gap / 2 + 5, "dp: gradients")

    weights = stage_weights(model_config, plan.stages, config.training.seq_length, pp)
    timeline = simulate(plan.schedule, Costs(weights=weights))
    row, gap, start = 40, 6, right + 50
    scale = (WIDTH - start - 8) / timeline.step_time
    picture.text(right, 16, f"{layout.pp_engine.upper()} schedule of each pipeline", "title")
    picture.legend(start, top - 24, timeline)
    for p in range(pp):
        picture.box(right, top + 16 + p * (row + gap), 44, 24, RANKS[p], f"pp {p}")
    picture.timeline(timeline, start, top + 8, scale, row, gap)
    axis = top + 14 + pp * (row + gap)
    picture.time_axis(start, axis, scale, timeline.step_time, 3, "unit: mean forward")
    m, B = config.training.gradient_accumulation_steps, config.training.micro_batch_size
    for i, line in enumerate(
        (
            f"Box: one of {m} micro-batches of {B} sequences.",
            f"Grey: idle, {timeline.bubble:.1%} of the step (the bubble).",
            "tp ranks sum partial results in every layer.",
            "pp ranks send hidden states and their gradients.",
            "dp ranks average gradients once per step.",
        )
    ):
        picture.text(right, axis + 72 + LINE * i, line)
    return str(picture)


SPLIT = {  # by axis: what it splits, and what the ranks of a group exchange
    "dp": ("the batch", "gradients"),
    "pp": ("the layers", "hidden states"),
    "cp": ("sequences", "keys and values"),
    "tp": ("the matrices", "partial sums"),
}


def axes(size: int = 2) -> str:
    """Draw 16 ranks four times, once for each axis: the colour is the part that a rank holds, arrows join a group."""
    layout = quickstart(**{f"{axis}_size": size for axis in SPLIT}).distributed
    box, near, far, panel, top = 30, 56, 120, WIDTH / 4, 2 * LINE + 32
    picture = Svg(WIDTH, top + near + far + box)
    for number, (axis, (what, exchanged)) in enumerate(SPLIT.items()):
        left = number * panel
        picture.text(left, 16, f"{axis} splits {what}", "title")
        picture.text(left, 16 + LINE, f"Arrows: {exchanged}")
        grids = []
        for rank in range(layout.world_size):
            with fake_rank(rank, layout):
                grids.append(pgm.process_group_manager)
        places = [
            (left + 22 + far * grid.pp_rank + near * grid.tp_rank, top + far * grid.dp_rank + near * grid.cp_rank)
            for grid in grids
        ]
        for rank, (grid, (x, y)) in enumerate(zip(grids, places, strict=True)):
            part = {"dp": grid.dp_rank, "pp": grid.pp_rank, "cp": grid.cp_rank, "tp": grid.tp_rank}[axis]
            picture.box(x, y, box, box, RANKS[2 * part], str(rank), title=f"rank {rank}: {axis} {part}")
            for other in following(grid, axis):
                lane = grid.cp_rank if axis == "dp" else grid.tp_rank
                link(picture, (x, y), places[other], box, lane, f"{axis}: ranks {rank} and {other}")
    return str(picture)


def link(picture: Svg, start: tuple[float, float], end: tuple[float, float], box: float, lane: int, title: str) -> None:
    """Add an arrow between two boxes of a row or of a column; around the boxes between them, in a lane of its own."""
    along = 0 if start[1] == end[1] else 1
    middle, side = start[1 - along] + box / 2, start[1 - along] - 3
    if end[along] - start[along] < 2 * box:
        bent = [(start[along] + box + 3, middle), (end[along] - 3, middle)]
    else:
        first, last = (place[along] + box / 2 + 12 * lane - 6 for place in (start, end))
        out = side - 8 - 8 * lane
        bent = [(first, side), (first, out), (last, out), (last, side)]
    numbers = (number for point in bent for number in (point if along == 0 else point[::-1]))
    picture.arrow(*numbers, double=True, title=title)


if __name__ == "__main__":
    main(__doc__, overview, axes)
