"""Pictures of single ideas for the pages, drawn from what the code does:

python -m docs.programs.pictures shards --out docs/pictures/shards.svg
"""

import math

from conformance.worker_pool import WorkerPool
from docs.programs import svg
from docs.programs.collectives import COLLECTIVES, before_and_after
from docs.programs.quickstart import layer_shards, quickstart
from docs.programs.svg import RANKS, main
from picotron import process_group_manager as pgm
from picotron.context_parallel.context_parallel import local_positions, visible_blocks
from workbench.drawing.draw_svg import LINE, WIDTH, Svg, lighter
from workbench.explain.fake_group import fake_rank


def collectives(n: int = 4) -> str:
    """Draw what each of n ranks has before and after a collective, as computed by n processes."""
    size, row, left, arrow, panel = 44, 34, 64, 44, 496
    height = n * row + 2 * LINE + 10
    picture = Svg(WIDTH, 4 * height + 2 * LINE)
    x, _ = picture.keys(0, 0, *((RANKS[rank], f"from rank {rank}") for rank in range(n)))
    picture.text(x, 14, "four colours: a sum over the ranks")
    picture.text(0, LINE + 17, "Left: before the call. Right: after it. The number of block b of rank r is 10 r + b.")
    pool = WorkerPool()
    for number, name in enumerate(name for name in COLLECTIVES if name != "all_reduce_in_parts"):
        x, y = number % 2 * panel, 2 * LINE + 10 + number // 2 * height
        picture.text(x, y + 16, name.replace("_", "-").replace("send-recv", "send and receive"), "title")
        for rank, numbers in enumerate(pool.run(before_and_after, n, name)):
            top = y + LINE + 4 + rank * row
            picture.text(x, top + 21, f"rank {rank}")
            for column, values in zip((x + left, x + left + n * size + arrow), numbers, strict=True):
                picture.frame(column, top, n * size - 3, row - 4)
                for i, value in enumerate(values):
                    is_sum = value >= 10 * n
                    if len(values) == 1:  # a shard is drawn where it belongs in the full tensor
                        i = rank if is_sum else value % 10
                    left_edge, width = column + i * size, size - 3
                    picture.box(left_edge, top, width, row - 4, "#ffffff" if is_sum else RANKS[value // 10])
                    for source in range(n) if is_sum else ():
                        picture.box(left_edge + source * width / n, top + row - 12, width / n, 8, RANKS[source])
                    picture.text(left_edge + width / 2, top + (17 if is_sum else 21), str(value), "label")
        middle = y + LINE + 2 + n * row / 2
        picture.arrow(x + left + n * size + 4, middle, x + left + n * size + arrow - 8, middle)
    pool.close()
    return str(picture)


def matrices(tp: int = 4) -> str:
    """Draw the matrices of a layer to scale, with the shard of each rank."""
    layer = layer_shards(tp)
    parts = {
        name: [
            svg.Part(shard.dim, shard.start, shard.stop, RANKS[rank], str(rank), f"{name}, rank {rank}")
            for rank, shard in enumerate(shards)
        ]
        for name, (_, shards) in layer.items()
    }
    return svg.matrices({name: shape for name, (shape, _) in layer.items()}, parts, f"Numbers: the {tp} tp ranks.")


def block() -> str:
    """Draw the activations of an attention block on two tp ranks, without and with sequence parallelism."""
    width, height, step, column, names = 84, 44, 82, 496, 214
    replicated = lighter("#888888", 0.5)
    picture = Svg(WIDTH, 6 * step + 2 * LINE)
    picture.keys(0, 0, (RANKS[0], "rank 0"), (RANKS[1], "rank 1"), (replicated, "replicated: equal on both"))
    picture.text(
        0, LINE + 17, "Rectangle: tokens (down) x features (across). Stripes: partial, a term of the true value."
    )
    # (tensor, its shape, how it is divided), and the operation that computes the next one
    middle = [
        ("q, k, v", "(B, T, heads/tp, d)", "heads", "attention"),
        ("a", "(B, T, H/tp, d)", "heads", "o_proj: columns"),
    ]
    for x, title, flow in (
        (0, "tensor parallelism", [
            ("x in", "(B, T, D)", "", "copy (backward: all-reduce)"),
            ("x", "(B, T, D)", "", "q, k, v_proj: rows"), *middle,
            ("y", "(B, T, D)", "partial", "all-reduce"),
            ("y out", "(B, T, D)", "", ""),
        ]),
        (column, "with sequence parallelism", [
            ("x in", "(B, T/tp, D)", "tokens", "all-gather"),
            ("x", "(B, T, D)", "", "q, k, v_proj: rows"), *middle,
            ("y", "(B, T, D)", "partial", "reduce-scatter"),
            ("y out", "(B, T/tp, D)", "tokens", ""),
        ]),
    ):  # fmt: skip
        picture.text(x, 2 * LINE + 24, title, "title")
        for number, (name, shape, divided, operation) in enumerate(flow):
            y = 3 * LINE + 14 + number * step
            for rank in range(2):
                left, colour = x + rank * (width + 12), RANKS[rank]
                picture.frame(left, y, width, height)
                if divided == "heads":
                    picture.box(left + rank * width / 2, y, width / 2, height, colour)
                elif divided == "tokens":
                    picture.box(left, y + rank * height / 2, width, height / 2, colour)
                elif divided == "partial":
                    for stripe in range(0, width, 12):
                        picture.box(left + stripe, y, 6, height, colour)
                else:
                    picture.box(left, y, width, height, replicated)
                if operation:
                    picture.arrow(left + width / 2, y + height + 4, left + width / 2, y + step - 4)
            kind = {"": "replicated", "partial": "partial"}.get(divided, f"sharded by {divided}")
            picture.text(x + names, y + 18, f"{name}: {kind}")
            picture.text(x + names, y + 38, shape)
            if operation:
                picture.text(x + names, y + step - 14, operation, "title")
    return str(picture)


def shards(cp: int = 4) -> str:
    """Draw causal attention in 2 cp chunks: the rank of each chunk of queries, and the number of blocks per rank."""
    size, left, top = 46, 76, 3 * LINE
    half = WIDTH - (2 * cp * size + left)  # where the second drawing begins
    picture = Svg(WIDTH, top + 2 * cp * size + LINE + 4)
    for x, sharding in ((0, "contiguous"), (half, "zigzag")):
        picture.text(x, 16, sharding, "title")
        picture.text(x + left, 16 + LINE, "chunks of keys")
        picture.arrow(x + left + 136, 11 + LINE, x + left + 2 * cp * size, 11 + LINE)
        picture.text(x, 16 + LINE, "queries")
        owner: dict[int, int] = {}
        for rank in range(cp):
            owner |= {int(chunk): rank for chunk in local_positions(2 * cp, cp, rank, sharding)}
        for key in range(2 * cp):
            picture.text(x + left + (key + 0.5) * size, top - 6, str(key), "centred")
        svg.causal(picture, x + left, top, size, [owner[query] for query in range(2 * cp)])
        blocks = (sum(query + 0.5 for query in owner if owner[query] == rank) for rank in range(cp))
        numbers = ", ".join(f"{count:g}" for count in blocks)
        picture.text(x + left, top + 2 * cp * size + LINE, f"blocks computed by rank 0 to {cp - 1}: {numbers}")
    return str(picture)


def ring_steps(cp: int = 4) -> str:
    """Draw the keys that a rank has in each step of the ring, and the queries that attend to them (zigzag)."""
    size, left, config = 76, 70, quickstart(cp_size=cp)
    column, row = (WIDTH - left - 140) / (cp - 1), size + 34
    picture = Svg(WIDTH, cp * row + 4 * LINE)
    for rank in range(cp):
        y = LINE + 26 + rank * row
        picture.text(0, y + size / 2 + 6, f"rank {rank}")
        for step in range(cp):
            x, source = left + step * column, (rank - step) % cp
            if rank == 0:
                picture.text(x, 16, f"ring step {step}", "title")
            picture.text(x, y - 6, f"keys of rank {source}")
            picture.frame(x, y, size, size)
            with fake_rank(rank, config.distributed):
                blocks = visible_blocks(source, 2, "zigzag")
            for queries, keys, causal, *_ in blocks:
                for query in range(2)[queries]:
                    for key in range(2)[keys]:
                        corner = (x + key * size / 2, y + query * size / 2)
                        if causal and query == key:
                            picture.triangle(*corner, size / 2, RANKS[source])
                        elif not causal or key < query:
                            picture.box(*corner, size / 2, size / 2, RANKS[source])
            if step < cp - 1 and rank < cp - 1:
                picture.arrow(x + size + 6, y + size / 2, x + column - 6, y + row + size / 2 - 8)
    y = LINE + 14 + cp * row
    picture.text(
        0, y + 8, "Square: the rank's two chunks of queries (rows) and the two chunks of keys (columns) that it has."
    )
    picture.text(0, y + 30, f"Arrow: keys and values move on to the next rank; those of rank {cp - 1} move to rank 0.")
    return str(picture)


def dispatch(ep: int = 2, experts: int = 4) -> str:
    """Draw the rows of two ranks, each with four tokens, on their way to their experts and back."""
    size, left, rows, column = 56, 8, 96, 496
    chosen = [[2, 0, 3, 0], [1, 2, 0, 1]]  # expert of each token of each rank
    tokens = [[(rank, token, expert) for token, expert in enumerate(each)] for rank, each in enumerate(chosen)]
    ordered = [sorted(each, key=lambda row: row[2]) for each in tokens]
    own = experts // ep
    arrived = [[row for each in ordered for row in each if row[2] // own == rank] for rank in range(ep)]
    grouped = [sorted(each, key=lambda row: row[2]) for each in arrived]
    picture = Svg(WIDTH, 5 * rows + 2 * LINE)
    picture.keys(0, 0, *((RANKS[rank], f"token of rank {rank}") for rank in range(ep)))
    stages = (
        ("tokens", tokens, "sort by expert"),
        ("sorted by expert", ordered, "all-to-all"),
        ("arrived", arrived, "sort by expert"),
        ("each expert's rows", grouped, "experts, then all the way back"),
        ("outputs, at home", tokens, ""),
    )
    for number, (name, state, operation) in enumerate(stages):
        y = 2 * LINE + number * rows
        for rank in range(ep):
            x = rank * column
            held = f" (experts {rank * own} to {(rank + 1) * own - 1})" if state in (arrived, grouped) else ""
            picture.text(x + left, y, f"rank {rank}: {name}{held}")
            for i, (source, token, expert) in enumerate(state[rank]):
                title = f"token {token} of rank {source}, for expert {expert}"
                picture.box(x + left + i * size, y + 8, size - 4, 34, RANKS[source], f"{token}: e{expert}", title)
            if operation:
                picture.arrow(x + left + 20, y + 46, x + left + 20, y + rows - 20)
                picture.text(x + left + 34, y + 68, operation, "title")
    return str(picture)


SPLIT = {  # by axis: what it splits, and what the ranks of a group exchange
    "dp": ("the batch", "gradients"),
    "pp": ("the layers", "hidden states"),
    "cp": ("sequences", "keys and values"),
    "tp": ("the matrices", "partial sums"),
}


def axes(size: int = 2) -> str:
    """Draw 16 ranks four times, once for each axis: the colour is the part that a rank holds, arrows join a group. The
    places are those of a tesseract, so that no rank lies between two others of a group.
    """
    layout = quickstart(**{f"{axis}_size": size for axis in SPLIT}).distributed
    box, skew, near, far, panel, top = 30, 22, 60, 112, WIDTH / 4, 2 * LINE + 12
    picture = Svg(WIDTH, top + skew + near + far + box)
    for number, (axis, (what, exchanged)) in enumerate(SPLIT.items()):
        left = number * panel
        picture.text(left, 16, f"{axis} splits {what}", "title")
        picture.text(left, 16 + LINE, f"Arrows: {exchanged}")
        grids = []
        for rank in range(layout.world_size):
            with fake_rank(rank, layout):
                grids.append(pgm.process_group_manager)
        places = [
            (left + far * grid.pp_rank + near * grid.tp_rank + skew * grid.cp_rank,
             top + far * grid.dp_rank + near * grid.cp_rank + skew * grid.tp_rank)
            for grid in grids
        ]  # fmt: skip
        for rank, (grid, (x, y)) in enumerate(zip(grids, places, strict=True)):
            part = getattr(grid, f"{axis}_rank")
            picture.box(x, y, box, box, RANKS[2 * part], str(rank), title=f"rank {rank}: {axis} {part}")
            for other in getattr(grid, f"{axis}_group_ids")[part + 1 : part + 2]:
                dx, dy = places[other][0] - x, places[other][1] - y
                x0, y0, trim = x + box / 2, y + box / 2, 21 / math.hypot(dx, dy)
                points = [x0 + trim * dx, y0 + trim * dy, x0 + (1 - trim) * dx, y0 + (1 - trim) * dy]
                picture.arrow(*points, double=True, title=f"{axis}: ranks {rank} and {other}")
    return str(picture)


if __name__ == "__main__":
    main(__doc__, axes, collectives, matrices, block, shards, ring_steps, dispatch)
