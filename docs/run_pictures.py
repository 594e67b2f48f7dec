"""Pictures of a whole run: what the quickstart's processes hold, train on and write.

    python -m docs.run_pictures grid --out docs/pictures/grid.svg

Nothing here is computed anew: every rank's place, stages, heads, sequences and bytes are asked of the code that trains.
"""

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from docs.pictures import RANKS, Svg, main
from docs.quickstart import CPU, quickstart, stage_of
from picotron import process_group_manager as pgm
from picotron.checkpoint.safetensors_folder import ByteRange
from picotron.checkpoint.stage_files import StageFiles, TensorSlice
from picotron.config import Config
from picotron.data import MicroBatchDataLoader
from picotron.explain.fake_group import fake_rank
from picotron.model import load_model_config
from picotron.process_group_manager import new_groups
from picotron.schedules.draw_svg import lighter
from picotron.schedules.stages import Stage
from picotron.weights import parameters_and_shards

WIDTH, BOX, GAP, LINE = 960, 64, 120, 24  # pixels: the picture's width, a rank's height, between stages, of a text


def in_words(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    layers = f"layers {first} to {last}" if first < last else f"layer {first}"
    return "embedding, " * stage.has_embedding + layers + ", head" * stage.has_head


def micro_batches(config: Config) -> list[list[int]]:
    """The numbers of the sequences that this rank gets from the first global batch."""
    numbers = np.arange(config.global_batch_size).repeat(config.training.seq_length)  # all tokens of sequence n are n
    loader = MicroBatchDataLoader(np.append(numbers, 0), config, CPU, shuffle=False)
    return [next(loader)["input_ids"][:, 0].tolist() for _ in range(loader.grad_acc_steps)]


def told(config: Config) -> list[str]:
    """What this rank is and holds."""
    rank, model_config = pgm.process_group_manager, load_model_config(config.model)
    stage = stage_of(config)
    queries = next(shard for name, _, shard in parameters_and_shards(stage.module) if name.endswith("q_proj.weight"))
    heads = range(model_config.num_attention_heads)
    if queries is not None:
        heads = range(queries.start // model_config.head_dim, queries.stop // model_config.head_dim)
    parameters = sum(parameter.numel() for parameter in stage.parameters())
    return [
        f"rank {rank.global_rank}: dp {rank.dp_rank}, pp {rank.pp_rank}, cp {rank.cp_rank}, tp {rank.tp_rank}",
        f"{', then '.join(map(in_words, stage.stages.values()))}; heads {heads[0]} to {heads[-1]}",
        f"{parameters:,} parameters, with their gradients and moments",
    ]


def grid() -> str:
    """A row of boxes for each pipeline, a column for each stage; in a stage the ranks that share its matrices."""
    dp, pp, tp = 2, 2, 2
    config = quickstart(dp_size=dp, pp_size=pp, tp_size=tp, gradient_accumulation_steps=4)
    width, row = (WIDTH - (pp - 1) * GAP) / pp, BOX + LINE
    pipeline = tp * row + 2 * LINE
    picture = Svg(WIDTH, dp * pipeline - 2 * LINE)
    for rank, (d, p, t) in enumerate(itertools.product(range(dp), range(pp), range(tp))):
        x, top = p * (width + GAP), d * pipeline + LINE + t * row
        with fake_rank(rank, config.distributed):
            lines, sequences = told(config), itertools.chain(*micro_batches(config))
        if p == t == 0:
            numbers = ", ".join(map(str, sequences))
            picture.text(0, top - 9, f"Pipeline {d}: of every {config.global_batch_size} sequences numbers {numbers}")
        picture.box(x, top, width, BOX, lighter(RANKS[p], 0.3 + 0.3 * t / tp), title=lines[0])
        for i, line in enumerate(lines):
            picture.text(x + width / 2, top + 19 + 18 * i, line, "label")
        if p < pp - 1:
            picture.text(x + width + 12, top + 29, "hidden states \N{RIGHTWARDS ARROW}")
            picture.text(x + width + 12, top + 46, "\N{LEFTWARDS ARROW} gradients")
        if t < tp - 1:
            picture.text(x, top + BOX + 16, "\N{UP DOWN ARROW} partial results, in every layer")
        elif d < dp - 1:
            picture.text(x, top + BOX + 16, "\N{UP DOWN ARROW} average of gradients, once a step")
    return str(picture)


def batch() -> str:
    """A global batch of the quickstart: who trains on which sequences, and when."""
    dp, steps, width, left = 2, 4, 180, 60
    config = quickstart(dp_size=dp, gradient_accumulation_steps=steps)
    picture = Svg(left + steps * width, (dp + 1) * LINE)
    for i in range(steps):
        picture.text(left + i * width + 4, 16, f"micro-batch {i}")
    for rank in range(dp):
        top = (rank + 1) * LINE
        picture.text(0, top + 15, f"dp {rank}")
        with fake_rank(rank, config.distributed):
            found = micro_batches(config)
        for i, rows in enumerate(found):
            label = f"sequences {', '.join(map(str, rows))}"
            picture.box(left + i * width, top, width - 4, LINE - 4, RANKS[rank], label)
    return str(picture)


def written_ranges(config: Config, rank: int) -> tuple[list[TensorSlice], list[ByteRange]]:
    """What the model's file of a rank's stage holds, and which parts of it the rank writes: the writing is watched."""
    no_state: Any = SimpleNamespace(state_of=lambda parameter: {})  # the optimizer's files are alike
    # A checkpoint's groups are gloo's, whatever the device; here all are fake.
    fake_groups = mock.patch("picotron.checkpoint.stage_files.new_groups", lambda rows, _: new_groups(rows))
    with fake_rank(rank, config.distributed), fake_groups, tempfile.TemporaryDirectory() as folder:
        files = StageFiles(stage_of(config).module, no_state)
        slices = files.slices()
        (written,) = files.write(Path(folder), slices)
    return slices, written.ranges


def part_of_model(name: str) -> str:
    """`layer 3` of model.layers.3.mlp.up_proj.weight. The norm before the head is too small to be told."""
    words = name.split(".")
    return f"layer {words[2]}" if words[1] == "layers" else words[1].replace("norm", "")


def checkpoint_files() -> str:
    """The model's files of a run with pp 2 x tp 2, to scale in bytes; a colour for each rank that writes."""
    pp, tp, bar = 2, 2, 30
    config = quickstart(pp_size=pp, tp_size=tp)
    found = [written_ranges(config, rank) for rank in range(pp * tp)]
    scale = WIDTH / max(part.start + part.size for _, parts in found for part in parts)
    picture = Svg(WIDTH, pp * 90)
    for rank, (slices, parts) in enumerate(found):
        top = rank // tp * 90 + 20
        picture.box(220 + 75 * (rank % tp), top - 18, 65, 15, RANKS[rank], f"rank {rank}")
        for part in parts:
            title = f"rank {rank}: bytes {part.start:,} to {part.start + part.size:,}"
            picture.box(part.start * scale, top, part.size * scale, bar, RANKS[rank], title=title)
        if rank % tp == 0:
            picture.text(0, top - 7, slices[0].file)
            for name, held in itertools.groupby(slices, lambda each: part_of_model(each.name)):
                picture.text(next(held).start * scale + 2, top + bar + 15, name)
    return str(picture)


if __name__ == "__main__":
    main(__doc__, grid, batch, checkpoint_files)
