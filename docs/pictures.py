"""The pictures of the pages, from what the code really does:

python -m docs.pictures buckets --out docs/pictures/buckets.svg
"""

import argparse
from collections.abc import Callable
from html import escape
from pathlib import Path

from docs.quickstart import quickstart, stage_of
from picotron.context_parallel.context_parallel import visible_blocks
from picotron.context_parallel.positions import local_positions
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.explain.fake_group import fake_rank
from picotron.schedules.draw_svg import COLOURS, GAP, ROW, STYLE, as_svg
from picotron.schedules.schedules import build
from picotron.schedules.simulate import Costs, simulate, summary
from picotron.weights import Shard, main_grad, parameters_and_shards

RANKS = [*(COLOURS[kind] for kind in "FBWI"), COLOURS["R"]]  # of the first five ranks


class Svg:
    """A picture that things are added to; sizes in pixels."""

    def __init__(self, width: float, height: float) -> None:
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", title: str = ""
    ) -> None:
        """A rectangle; its label is left out where it does not fit."""
        where = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self.parts.append(
            f'<rect class="action" {where} fill="{colour}"><title>{escape(title or label)}</title></rect>'
        )
        if label and width > 6.5 * len(label):
            self.text(x + width / 2, y + height / 2 + 4, label, "label")

    def triangle(self, x: float, y: float, size: float, colour: str) -> None:
        """The half of a square on and below its diagonal."""
        points = f"{x:.2f},{y:.2f} {x:.2f},{y + size:.2f} {x + size:.2f},{y + size:.2f}"
        self.parts.append(f'<polygon class="action" points="{points}" fill="{colour}"/>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        where = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self.parts.append(f'<rect class="idle" {where}/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}">{escape(text)}</text>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def buckets(bucket_mb: float = 4.0) -> str:
    """The quickstart's gradients in buckets, in the order in which they leave; a colour for each layer."""
    config = quickstart(dp_size=2)
    with fake_rank(0, config.distributed):
        stage = stage_of(config)
        model = DataParallelBucket(stage, bucket_mb, stage.parameters_by_stage())
    names = {parameter: name for name, parameter in stage.module.named_parameters()}
    picture, scale = Svg(960, 34 * len(model.buckets) + 22), 800 / max(b.buffer.nbytes for b in model.buckets)
    for row, bucket in enumerate(model.buckets):
        x, y = 150.0, 34.0 * row
        picture.text(0, y + 18, f"bucket {row}: {bucket.buffer.nbytes / 2**20:.2f} MiB")
        for parameter in bucket.parameters:
            parts, width = names[parameter].split("."), main_grad(parameter).nbytes * scale
            layer = int(parts[2]) if "layers" in parts else None
            colour = RANKS[4] if layer is None else RANKS[layer]
            label = parts[-2] if layer is None else f"{layer} {parts[-2]}"
            picture.box(x, y, width, 26, colour, label, names[parameter])
            x += width
    picture.text(
        150,
        34 * len(model.buckets) + 14,
        "Backward fills them from the top left to the bottom right; a full one leaves at once.",
    )
    return str(picture)


def matrices(tp: int = 4) -> str:
    """The matrices of a layer, to scale, with the part of each rank."""
    config, parts = quickstart(tp_size=tp), dict[str, dict[int, Shard]]()
    shapes = {}
    for rank in range(tp):
        with fake_rank(rank, config.distributed):
            layer = stage_of(config).module.model.layers["0"]
            for name, parameter, shard in parameters_and_shards(layer):
                if shard is not None:
                    parts.setdefault(name.split(".")[1], {})[rank] = shard
                    shapes[name.split(".")[1]] = shard.full_shape(parameter.shape)
    scale, gap = 0.24, 24
    width = sum(scale * shape[1] + gap for shape in shapes.values())
    height = max(scale * shape[0] for shape in shapes.values())
    picture, x = Svg(width + 30, height + 66), 0.0
    for name, (rows, columns) in shapes.items():
        picture.text(x, 12, name)
        picture.text(x, 26, f"{rows} x {columns}")
        for rank, shard in parts[name].items():
            start, size = shard.start * scale, (shard.stop - shard.start) * scale
            title = f"{name}, rank {rank}: {'rows' if shard.dim == 0 else 'columns'} {shard.start} to {shard.stop - 1}"
            if shard.dim == 0:
                picture.box(x, 34 + start, columns * scale, size, RANKS[rank], title=title)
            else:
                picture.box(x + start, 34, size, rows * scale, RANKS[rank], title=title)
        x += columns * scale + gap
    for rank in range(tp):
        picture.box(80 * rank, height + 46, 70, 18, RANKS[rank], f"rank {rank}")
    return str(picture)


def shards(cp: int = 4) -> str:
    """Causal attention in 2 cp chunks: who has which queries, and how many blocks of scores that makes."""
    size, top = 36, 24
    picture = Svg(2 * (2 * cp * size + 130), top + 2 * cp * size + 30)
    for number, sharding in enumerate(("contiguous", "zigzag")):
        left = number * (2 * cp * size + 130) + 50
        picture.text(left, 14, f"{sharding}: a row is a chunk of queries, a column one of keys")
        owner: dict[int, int] = {}
        for rank in range(cp):
            owner |= {int(p): rank for p in local_positions(2 * cp, cp, rank, sharding)}
        work = [0.0] * cp
        for query in range(2 * cp):
            y = top + query * size
            picture.text(left - 46, y + size / 2 + 4, f"rank {owner[query]}")
            for key in range(query):
                picture.box(left + key * size, y, size, size, RANKS[owner[query]])
                work[owner[query]] += 1
            picture.triangle(left + query * size, y, size, RANKS[owner[query]])
            work[owner[query]] += 0.5
        told = ", ".join(f"rank {rank} {blocks:g}" for rank, blocks in enumerate(work))
        picture.text(left, top + 2 * cp * size + 18, f"blocks: {told}")
    return str(picture)


def ring_steps(cp: int = 4) -> str:
    """Which keys a rank has in each step of the ring, and which of its queries see which of them (zigzag)."""
    size, config = 64, quickstart(cp_size=cp)
    picture = Svg(60 + cp * (size + 90), cp * (size + 14) + 40)
    for step in range(cp):
        picture.text(60 + step * (size + 90), 12, f"ring step {step}")
    for rank in range(cp):
        y = 22 + rank * (size + 14)
        picture.text(0, y + size / 2, f"rank {rank}")
        for step in range(cp):
            x, source = 60 + step * (size + 90), (rank - step) % cp
            picture.frame(x, y, size, size)
            with fake_rank(rank, config.distributed):
                blocks = visible_blocks(source, 2, "zigzag")
            for queries, keys, causal in blocks:
                rows, columns = range(2)[queries], range(2)[keys]
                for row in rows:
                    for column in columns:
                        at = (x + column * size / 2, y + row * size / 2)
                        if causal and row == column:
                            picture.triangle(*at, size / 2, RANKS[source])
                        elif not causal or column < row:
                            picture.box(*at, size / 2, size / 2, RANKS[source])
            picture.text(x + size + 6, y + size / 2, f"keys of {source}")
    picture.text(
        60,
        cp * (size + 14) + 34,
        "A square: both chunks of the rank's queries (rows) and of the keys that are there (columns).",
    )
    return str(picture)


def schedules(pp: int = 4, microbatches: int = 8) -> str:
    """Schedules on the clock of `simulate`, all on one scale, where a backward takes as long as two forwards."""
    names = ("afab", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")
    built = {name: build(name, pp, microbatches) for name in names}
    timelines = {name: simulate(s, Costs(weights=[1 / s.chunks] * s.num_stages)) for name, s in built.items()}
    duration, height = max(timeline.step_time for timeline in timelines.values()), pp * (ROW + GAP) + 34
    picture = Svg(960, height * len(timelines))
    for number, (name, timeline) in enumerate(timelines.items()):
        facts = ", ".join(f"{what} {value}" for what, value in summary(timeline).items())
        picture.text(0, number * height + 14, f"{name}: {facts}")
        picture.parts.append(as_svg(timeline, duration).replace("<svg ", f'<svg y="{number * height + 22}" ', 1))
    return str(picture)


def main(description: str | None, *pictures: Callable[[], str]) -> None:
    """A program that draws these pictures, each by its name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=(by_name := {picture.__name__: picture for picture in pictures}))
    parser.add_argument("--out", type=Path, required=True, help="the .svg")
    options = parser.parse_args()
    options.out.write_text(by_name[options.picture](), encoding="utf-8")


if __name__ == "__main__":
    main(__doc__, buckets, matrices, schedules, shards, ring_steps)
