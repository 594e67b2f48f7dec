"""Check of puzzle 6: the shards that every rank of a real model holds."""

from types import ModuleType
from typing import Any

import torch.distributed as dist

from docs.programs.quickstart import quickstart, stage_of
from docs.programs.svg import LINE, WIDTH, Svg
from picotron.model.placement import placement
from puzzles.group import Group
from puzzles.pictures import colour_of
from puzzles.report import RED, Report
from workbench.explain.fake_group import fake_rank

Part = tuple[int, int, int]
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shards(rank: int, tp: int) -> tuple[dict[str, Part], dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the shards of a rank of the quickstart's model, the shapes of the full matrices, and the model's sizes."""
    parts, shapes = {}, {}
    with fake_rank(rank, quickstart(tp_size=tp).distributed):
        stage = stage_of(quickstart(tp_size=tp))
        model = stage.module.config
        for full_name, parameter in stage.module.model.layers["0"].named_parameters():
            shard = placement(parameter).shard
            name = full_name.split(".")[-2]
            if name in NAMES:
                assert shard is not None
                parts[name] = (shard.dim, shard.start, shard.stop)
                shapes[name] = tuple(shard.full_shape(parameter.shape))
    sizes = {"H": model.num_attention_heads, "K": model.num_key_value_heads, "d": model.head_dim}
    return parts, shapes, sizes | {"F": model.intermediate_size}


def check(learner: ModuleType, group: Group, report: Report) -> None:
    dist.destroy_process_group()  # the fake groups take its place
    for tp in (2, 4, 8):
        expected = [shards(rank, tp) for rank in range(tp)]
        _, shapes, sizes = expected[0]
        results: list[dict[str, Part]] = [{} for _ in range(tp)]
        text = ", ".join(f"{key}={value}" for key, value in sizes.items())
        for name in NAMES:
            for rank in range(tp):
                report.begin(f"split({name!r}, rank={rank}, tp={tp}, {text})")
                results[rank][name] = learner.split(name, rank, tp, **sizes)
        shown = [{name: tuple(p) if isinstance(p, tuple | list) else () for name, p in own.items()} for own in results]
        report.picture = draw(shown, [parts for parts, _, _ in expected], shapes)
        for name in NAMES:
            for rank in range(tp):
                where = f"split({name!r}, rank={rank}, tp={tp}, {text})"
                group.expect(results[rank][name], expected[rank][0][name], where, ("dimension", "start", "stop"))


def draw(
    results: list[dict[str, tuple[Any, ...]]], expected: list[dict[str, Part]], shapes: dict[str, tuple[int, ...]]
) -> str:
    """Draw the matrices, all on the same scale, with the parts of the learner's ranks; wrong ones are red."""
    gap, top, x = 40, 3 * LINE, 0.0
    scale = (WIDTH - gap * (len(NAMES) - 1)) / sum(shapes[name][1] for name in NAMES)
    tall = max(scale, 1.05)  # pixels of a row, so that the numbers fit
    picture = Svg(WIDTH, top + tall * max(shapes[name][0] for name in NAMES) + 1.5 * LINE)
    for name in NAMES:
        height, width = shapes[name]
        picture.text(x, 14, name, "title")
        picture.text(x, 34, f"{height} x {width}")
        picture.frame(x, top, width * scale, height * tall)
        for rank, parts in enumerate(results):
            part = parts[name]
            colour = colour_of(rank) if part == expected[rank][name] else RED
            title = f"{name}, rank {rank}: yours {part}, expected {expected[rank][name]}"
            if len(part) == 3 and all(isinstance(each, int) for each in part):
                sharing = [other for other, those in enumerate(results) if those[name] == part]
                unit = tall if part[0] == 0 else scale
                start, size = part[1] * unit, max(0, part[2] - part[1]) * unit
                if part[0] == 0:
                    own = width * scale / len(sharing)
                    picture.box(x + sharing.index(rank) * own, top + start, own, size, colour, str(rank), title)
                else:
                    own = height * tall / len(sharing)
                    picture.box(x + start, top + sharing.index(rank) * own, size, own, colour, str(rank), title)
        x += width * scale + gap
    note = f"Numbers: the tp ranks, of {len(results)}. Ranks that hold the same part share its band."
    picture.text(0, top + tall * max(shapes[name][0] for name in NAMES) + LINE, f"{note} Red: wrong.")
    return str(picture)
