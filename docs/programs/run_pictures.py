"""Picture of ranks: what each axis splits, and which ranks it joins, as the code that trains says.

python -m docs.programs.run_pictures axes --out docs/pictures/axes.svg
"""

from docs.programs.quickstart import quickstart
from docs.programs.svg import RANKS, main
from picotron import process_group_manager as pgm
from workbench.drawing.draw_svg import LINE, WIDTH, Svg
from workbench.explain.fake_group import fake_rank


def following(grid: pgm.ProcessGroupManager, axis: str) -> list[int]:
    """Return the next rank of a rank's group along an axis; no rank for the last one."""
    ranks = {"tp": grid.tp_group_ids, "cp": grid.cp_group_ids, "pp": grid.pp_group_ids, "dp": grid.dp_group_ids}[axis]
    place = ranks.index(grid.global_rank) + 1
    return ranks[place : place + 1]


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
    main(__doc__, axes)
