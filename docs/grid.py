"""Pictures of what each process of the quickstart holds, whom it talks to, and what it trains on:

    python -m docs.grid grid --out docs/pictures/grid.svg

Nothing here is computed anew: every rank's place, stages, heads and sequences are asked of the code that trains.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader
from picotron.model import Llama, load_model_config
from picotron.pipeline_parallel.draw_svg import COLOURS, STYLE, lighter
from picotron.pipeline_parallel.layout import Stage
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.pipeline_parallel.plan import make_plan
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.weights import parameters_and_shards

WIDTH, BOX, GAP, LINE = 960, 68, 130, 26  # pixels: the picture's width, a rank's height, between stages, of a text


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one process has."""

    coordinates: tuple[int, int, int, int]
    """dp, pp, cp, tp"""
    holds: str
    """which parts of the model"""
    heads: range
    parameters: int
    micro_batches: list[list[int]]
    """the numbers of their sequences in the first global batch"""


def in_words(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    layers = f"layers {first} to {last}" if first < last else f"layer {first}"
    return "embedding, " * stage.has_embedding + layers + ", head" * stage.has_head


@contextmanager
def fake_rank(rank: int, config: Config) -> Iterator[None]:
    """Be this rank of a layout, in a process group that sends nothing."""
    layout = config.distributed
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
        yield
    finally:
        dist.destroy_process_group()


def micro_batches(config: Config) -> list[list[int]]:
    """The numbers of the sequences that this rank gets from the first global batch."""
    numbers = np.arange(config.global_batch_size).repeat(config.training.seq_length)  # all tokens of sequence n are n
    loader = MicroBatchDataLoader(np.append(numbers, 0), config, torch.device("cpu"), shuffle=False)
    return [next(loader)["input_ids"][:, 0].tolist() for _ in range(loader.grad_acc_steps)]


def rank_of_a_run(config: Config, rank: int) -> Rank:
    layout, model_config = config.distributed, load_model_config(config.model)
    with fake_rank(rank, config):
        grid = pgm.process_group_manager
        with torch.device("meta"):
            llama = apply_tensor_parallel(Llama(model_config), layout.sequence_parallel)
            stage = PipelineParallel(llama, make_plan(config, model_config))
        sequences = micro_batches(config)
    queries = next(shard for name, _, shard in parameters_and_shards(llama) if name.endswith("q_proj.weight"))
    size, heads = model_config.head_dim, model_config.num_attention_heads
    return Rank(
        (grid.dp_rank, grid.pp_rank, grid.cp_rank, grid.tp_rank),
        ", then ".join(in_words(held) for held in stage.stages.values()),
        range(queries.start // size, queries.stop // size) if queries else range(heads),
        sum(parameter.numel() for parameter in llama.parameters()),
        sequences,
    )


def quickstart() -> Config:
    return load_config(["--config", "template/base_config.json"])


def start_svg(width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">',
        f"<style>{STYLE}text {{ font-size: 13px }} .box {{ fill: #000 }} .rank {{ font-weight: bold }}</style>",
    ]


def as_svg(config: Config, ranks: list[Rank]) -> str:
    """A row of boxes per pipeline, a column per stage; in each the ranks that share its matrices or its sequences."""
    layout = config.distributed
    dp, pp, inner = layout.dp_size, layout.pp_size, layout.cp_size * layout.tp_size
    width, row = (WIDTH - (pp - 1) * GAP) / pp, BOX + LINE
    pipeline = inner * row + 2 * LINE
    height = dp * pipeline - 2 * LINE
    lines = start_svg(WIDTH, height)

    def text(x: float, y: float, words: str, kind: str = "") -> None:
        lines.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>')

    for number, rank in enumerate(ranks):
        d, p, c, t = rank.coordinates
        place = c * layout.tp_size + t
        x, top = p * (width + GAP), d * pipeline + LINE + place * row
        if p == place == 0:
            sequences = ", ".join(str(n) for rows in rank.micro_batches for n in rows)
            text(
                0,
                top - 9,
                f"Pipeline {d}: of every {config.global_batch_size} sequences those with numbers {sequences}",
            )
        colour = lighter(list(COLOURS.values())[p % 2], 0.3 + 0.3 * place / inner)
        lines.append(f'<rect x="{x:g}" y="{top}" width="{width:g}" height="{BOX}" rx="4" fill="{colour}"/>')
        text(x + 10, top + 21, f"rank {number}", "box rank")
        text(x + 75, top + 21, f"dp {d}, pp {p}, cp {c}, tp {t}", "box")
        text(x + 10, top + 40, f"{rank.holds}; heads {rank.heads[0]} to {rank.heads[-1]}", "box")
        text(x + 10, top + 59, f"{rank.parameters:,} parameters, with gradients and moments", "box")
        if p < pp - 1:
            text(x + width + 12, top + 30, "hidden states &#8594;")
            text(x + width + 12, top + 48, "&#8592; gradients")
        if place < inner - 1:
            shared = "partial results" if t < layout.tp_size - 1 else "keys and values"
            text(x + 10, top + BOX + 18, f"&#8645; {shared}, in every layer")
        elif d < dp - 1:
            text(x + 10, top + BOX + 18, "&#8645; average of gradients, once a step")
    return "\n".join([*lines, "</svg>\n"])


def grid() -> str:
    """The layout of the quickstart."""
    config = quickstart()
    return as_svg(config, [rank_of_a_run(config, rank) for rank in range(config.distributed.world_size)])


def batch() -> str:
    """A global batch of the quickstart: who trains on which sequences, and when."""
    config = quickstart()
    dp, steps = config.distributed.dp_size, config.training.gradient_accumulation_steps
    width, left = 180, 60
    lines = start_svg(left + steps * width, (dp + 1) * LINE)
    for i in range(steps):
        lines.append(f'<text x="{left + i * width + 4}" y="17">micro-batch {i}</text>')
    for dp_rank in range(dp):
        top, colour = (dp_rank + 1) * LINE, list(COLOURS.values())[dp_rank]
        lines.append(f'<text x="0" y="{top + 17}">dp {dp_rank}</text>')
        with fake_rank(dp_rank * config.distributed.world_size // dp, config):
            found = micro_batches(config)
        for i, rows in enumerate(found):
            x, words = left + i * width, ", ".join(map(str, rows))
            lines.append(f'<rect x="{x}" y="{top}" width="{width - 4}" height="{LINE - 4}" fill="{colour}"/>')
            lines.append(f'<text class="box" x="{x + 8}" y="{top + 16}">sequences {words}</text>')
    return "\n".join([*lines, "</svg>\n"])


PICTURES = {"grid": grid, "batch": batch}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("--out", type=Path, required=True, help="the .svg")
    options = parser.parse_args()
    options.out.write_text(PICTURES[options.picture](), encoding="utf-8")
