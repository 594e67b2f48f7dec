"""Check of puzzle 6: the shards that every rank of a real model holds."""

from types import ModuleType

import torch.distributed as dist

from docs.quickstart import quickstart, stage_of
from docs.svg import LINE, WIDTH, Svg
from picotron.explain.fake_group import fake_rank
from picotron.weights import parameters_and_shards
from puzzles.group import Group
from puzzles.pictures import colour_of
from puzzles.report import RED, Report

Part = tuple[int, int, int]
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shards(rank: int, tp: int) -> tuple[dict[str, Part], dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the shards of a rank of the quickstart's model, the shapes of the full matrices, and the model's sizes."""
    parts, shapes = {}, {}
    with fake_rank(rank, quickstart(tp_size=tp).distributed):
        stage = stage_of(quickstart(tp_size=tp))
        model = stage.module.config
        for full_name, parameter, shard in parameters_and_shards(stage.module.model.layers["0"]):
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
        results = [{name: learner.split(name, rank, tp, **sizes) for name in NAMES} for rank in range(tp)]
        report.picture = draw(results, [parts for parts, _, _ in expected], shapes)
        for name in NAMES:
            for rank in range(tp):
                text = ", ".join(f"{key}={value}" for key, value in sizes.items())
                where = f"split({name!r}, rank={rank}, tp={tp}, {text})"
                group.expect(results[rank][name], expected[rank][0][name], where, "(dimension, start, stop)")


def draw(results: list[dict[str, Part]], expected: list[dict[str, Part]], shapes: dict[str, tuple[int, ...]]) -> str:
    """Draw the matrices to scale, with the parts of the learner's ranks; wrong ones are red."""
    gap, top, x = 40, 3 * LINE, 0.0
    scale = (WIDTH - gap * (len(NAMES) - 1)) / sum(shapes[name][1] for name in NAMES)
    picture = Svg(WIDTH, top + scale * max(shapes[name][0] for name in NAMES) + LINE)
    for name in NAMES:
        height, width = shapes[name]
        picture.text(x, 14, name, "title")
        picture.text(x, 34, f"{height} x {width}")
        picture.frame(x, top, width * scale, height * scale)
        for rank, parts in enumerate(results):
            part = parts[name]
            colour = colour_of(rank) if tuple(part) == expected[rank][name] else RED
            title = f"{name}, rank {rank}: yours {part}, expected {expected[rank][name]}"
            if len(part) == 3 and all(isinstance(each, int) for each in part):
                start, size = part[1] * scale, max(0, part[2] - part[1]) * scale
                if part[0] == 0:
                    picture.box(x, top + start, width * scale, size, colour, title=title)
                else:
                    picture.box(x + start, top, size, height * scale, colour, title=title)
        x += width * scale + gap
    return str(picture)
