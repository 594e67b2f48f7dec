"""Check of puzzle 6: the shards that every rank of a real model holds."""

from types import ModuleType
from typing import Any

import torch.distributed as dist

from docs.programs.quickstart import layer_shards, quickstart
from docs.programs.svg import Part, colour_of, matrices
from puzzles.group import Group
from puzzles.report import RED, Report
from workbench.run.model_config import load_model_config


def check(learner: ModuleType, group: Group, report: Report) -> None:
    dist.destroy_process_group()  # the fake groups take its place
    model = load_model_config(quickstart().model)
    sizes = {"H": model.num_attention_heads, "K": model.num_key_value_heads, "d": model.head_dim}
    sizes["F"] = model.intermediate_size
    text = ", ".join(f"{key}={value}" for key, value in sizes.items())
    for tp in (2, 4, 8):
        layer = layer_shards(tp)
        results = {
            name: [report.ask(learner, "split", name, rank=rank, tp=tp, **sizes) for rank in range(tp)]
            for name in layer
        }
        expected = {name: [(each.dim, each.start, each.stop) for each in shards] for name, (_, shards) in layer.items()}
        shapes = {name: shape for name, (shape, _) in layer.items()}
        parts = {name: parts_of(name, results[name], expected[name]) for name in layer}
        note = f"Numbers: the tp ranks, of {tp}. Ranks that hold the same part share its band. Red: wrong."
        report.picture = matrices(shapes, parts, note)
        for name in layer:
            for rank in range(tp):
                where = f"split({name!r}, rank={rank}, tp={tp}, {text})"
                group.expect(results[name][rank], expected[name][rank], where, ("dimension", "start", "stop"))


def parts_of(name: str, results: list[Any], expected: list[tuple[int, int, int]]) -> list[Part]:
    """Return the parts of a matrix that the learner's ranks hold; wrong ones are red."""
    parts = []
    for rank, (result, right) in enumerate(zip(results, expected, strict=True)):
        if isinstance(result, tuple | list) and len(result) == 3 and all(isinstance(each, int) for each in result):
            dim, start, stop = result
            colour = colour_of(rank) if tuple(result) == right else RED
            title = f"{name}, rank {rank}: yours {result}, expected {right}"
            parts.append(Part(dim, start, stop, colour, str(rank), title))
    return parts
