"""Pictures of the quickstart: what its ranks hold, train on and write.

    python -m docs.programs.run_pictures overview --out docs/pictures/overview.svg

Each rank's coordinates, stages, heads, sequences and byte ranges are those of the code that trains.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from docs.programs.pictures import main
from docs.programs.quickstart import CPU, quickstart, stage_of
from docs.programs.svg import LINE, RANKS, WIDTH, Svg
from picotron import process_group_manager as pgm
from picotron.checkpoint.safetensors_folder import ByteRange
from picotron.checkpoint.stage_files import StageFiles, TensorSlice
from picotron.command_line import load_config
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.data.rows import TextRows
from picotron.drawing.draw_svg import COLOURS, lighter
from picotron.explain.fake_group import fake_rank
from picotron.model.model_config import load_model_config
from picotron.model.weights import parameters_and_shards
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.pipeline_parallel.stages import Stage, stage_weights
from picotron.process_group_manager import new_groups
from picotron.schedules.simulate import Costs, simulate

STAGES = [RANKS[2], RANKS[4], RANKS[0], RANKS[1]]  # colours; the first two differ from those of forward and backward


def contents(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    layers = f"layers {first}-{last}" if first < last else f"layer {first}"
    return "embedding, " * stage.has_embedding + layers + ", head" * stage.has_head


def held_heads(stage: PipelineParallel) -> str:
    """Return the attention heads of this rank."""
    config = stage.module.config
    shard = next(shard for name, _, shard in parameters_and_shards(stage.module) if name.endswith("q_proj.weight"))
    heads = range(config.num_attention_heads)
    if shard is not None:
        heads = range(shard.start // config.head_dim, shard.stop // config.head_dim)
    return f"heads {heads[0]}-{heads[-1]}"


def micro_batches(config: Config) -> list[list[int]]:
    """Return the numbers of the sequences in this rank's micro-batches of the first step."""
    length = config.training.seq_length
    numbers = np.arange(config.global_batch_size).repeat(length)  # each token of sequence n is n
    loader = MicroBatchDataLoader(TextRows(np.append(numbers, 0), length), config, CPU, shuffle=False)
    return [next(loader)["input_ids"][:, 0].tolist() for _ in range(loader.grad_acc_steps)]


def overview() -> str:
    """Draw what the ranks of the quickstart hold and exchange, and the schedule of one of its pipelines."""
    config = load_config(["--config", "template/base_config.json"])
    layout, model_config = config.distributed, load_model_config(config.model)
    plan = plan_pipeline(config, model_config)
    dp, pp, tp = layout.dp_size, layout.pp_size, layout.tp_size
    box, width, stage_gap, tp_gap, dp_gap, left, top = 46, 204, 26, 26, 32, 48, 66
    pipeline = tp * box + (tp - 1) * tp_gap
    right = left + pp * (width + stage_gap) + 12  # where the schedule begins
    picture = Svg(WIDTH, top + dp * pipeline + (dp - 1) * dp_gap + 12)

    picture.text(0, 16, f"{layout.world_size} ranks: dp {dp} x pp {pp} x cp {layout.cp_size} x tp {tp}", "title")
    for p in range(pp):
        x = left + p * (width + stage_gap)
        picture.text(x + width / 2, top - 10, f"pp {p}", "centred")
        if p < pp - 1:
            picture.arrow(x + width + 3, top + box / 2 - 6, x + width + stage_gap - 3, top + box / 2 - 6)
            picture.arrow(x + width + stage_gap - 3, top + box / 2 + 6, x + width + 3, top + box / 2 + 6)
    for rank, (d, p, t) in enumerate(itertools.product(range(dp), range(pp), range(tp))):
        x, y = left + p * (width + stage_gap), top + d * (pipeline + dp_gap) + t * (box + tp_gap)
        with fake_rank(rank, layout):
            stage = stage_of(config)
        lines = [f"rank {rank}: {held_heads(stage)}", ", then ".join(map(contents, stage.stages.values()))]
        picture.box(x, y, width, box, lighter(STAGES[p], 0.5 * t / tp), title=", ".join(lines))
        for i, line in enumerate(lines):
            picture.text(x + width / 2, y + 18 + 19 * i, line, "label")
        if p == 0:
            picture.text(0, y + pipeline / 2 + 6, f"dp {d}" if t == 0 else "")
        last = t == tp - 1
        if not last or d < dp - 1:
            gap = dp_gap if last else tp_gap
            picture.arrow(x + 12, y + box + 3, x + 12, y + box + gap - 3, double=True)
            picture.text(x + 24, y + box + gap / 2 + 5, "dp: gradients" if last else "tp: partial results")

    weights = stage_weights(model_config, plan.stages, config.training.seq_length, pp)
    timeline = simulate(plan.schedule, Costs(weights=weights))
    row, gap, start = 40, 6, right + 50
    scale = (WIDTH - start - 8) / timeline.step_time
    picture.text(right, 16, f"{layout.pp_engine.upper()} schedule of each pipeline", "title")
    picture.legend(start, top - 24, timeline)
    for p in range(pp):
        y = top + 8 + p * (row + gap)
        picture.box(right, y + 8, 44, 24, STAGES[p], f"pp {p}")
    picture.timeline(timeline, start, top + 8, scale, row, gap)
    axis = top + 14 + pp * (row + gap)
    picture.time_axis(start, axis, scale, timeline.step_time, 3, "unit: mean forward of one micro-batch")
    m, B = config.training.gradient_accumulation_steps, config.training.micro_batch_size
    with fake_rank(0, layout):
        grid = pgm.process_group_manager
        tp_group, pp_group, dp_group = (
            " and ".join(map(str, ranks)) for ranks in (grid.tp_group_ids, grid.pp_group_ids, grid.cp_dp_group_ids)
        )
    for i, line in enumerate(
        (
            f"Box: one of {m} micro-batches of {B} sequences.",
            f"Grey: idle, {timeline.bubble:.1%} of the step (the bubble).",
            f"tp: ranks {tp_group} sum partial results per layer.",
            f"pp: ranks {pp_group} send hidden states, gradients.",
            f"dp: ranks {dp_group} average gradients per step.",
        )
    ):
        picture.text(right, axis + 72 + LINE * i, line)
    return str(picture)


def batch() -> str:
    """Draw a global batch of the quickstart: the sequences of each dp rank and micro-batch."""
    dp, steps, width, left, row = 2, 4, 176, 54, 36
    config = quickstart(dp_size=dp, gradient_accumulation_steps=steps)
    picture = Svg(WIDTH, dp * row + 4 * LINE + 12)
    for x, colour, name in ((left, COLOURS["F"], "forward"), (left + 110, COLOURS["B"], "backward")):
        picture.box(x, 0, 18, 18, colour)
        picture.text(x + 25, 15, name)
    picture.text(left + 230, 15, "The numbers are those of the two sequences in a micro-batch.")
    for i in range(steps):
        picture.text(left + (i + 0.5) * width, LINE + 16, f"micro-batch {i}", "centred")
    for rank in range(dp):
        y = 2 * LINE + 2 + rank * row
        picture.text(0, y + 22, f"dp {rank}")
        with fake_rank(rank, config.distributed):
            batches = micro_batches(config)
        for i, rows in enumerate(batches):
            x, third, label = left + i * width, (width - 4) / 3, ", ".join(map(str, rows))
            picture.box(x, y, third, row - 4, COLOURS["F"], label)
            picture.box(x + third, y, 2 * third, row - 4, COLOURS["B"], label)
    x, bottom = left + steps * width, 2 * LINE + 2 + dp * row
    picture.frame(x, 2 * LINE + 2, WIDTH - x, dp * row - 4)
    for i, line in enumerate(("average gradients,", "update weights")):
        picture.text((x + WIDTH) / 2, (2 * LINE + bottom) / 2 - 4 + 21 * i, line, "centred")
    picture.arrow(left, bottom + 6, WIDTH, bottom + 6)
    picture.text(left, bottom + 28, "time of one step, not to scale")
    return str(picture)


def written_ranges(config: Config, rank: int) -> tuple[list[TensorSlice], list[ByteRange]]:
    """Let a rank write its stage's model file. Returns the tensors of the file and the byte ranges that it wrote."""
    no_state: Any = SimpleNamespace(state_of=lambda parameter: {})  # the optimizer's files are written in the same way
    # A checkpoint's groups use gloo on any device; here, all groups are fake.
    fake_groups = mock.patch("picotron.checkpoint.stage_files.new_groups", lambda rows, _: new_groups(rows))
    with fake_rank(rank, config.distributed), fake_groups, tempfile.TemporaryDirectory() as folder:
        files = StageFiles(stage_of(config).module, no_state)
        slices = files.slices()
        (written,) = files.write(Path(folder), slices)
    return slices, written.ranges


def part_of_model(name: str) -> str:
    """Return `layer 3` for model.layers.3.mlp.up_proj.weight. The last norm is too small for a label."""
    words = name.split(".")
    return f"layer {words[2]}" if words[1] == "layers" else words[1].replace("norm", "")


def matrix(name: str) -> str:
    """Return `gate` for model.layers.3.mlp.gate_proj.weight, and nothing for a norm."""
    return name.split(".")[-2].removesuffix("_proj") if "_proj" in name else ""


def checkpoint_files(zoomed: str = "layer 0") -> str:
    """Draw the model files of a run with pp 2 x tp 2, to scale in bytes; a colour for each rank that writes. A part of
    the first file is drawn again, enlarged.
    """
    pp, tp, bar, left = 2, 2, 40, 2
    config = quickstart(pp_size=pp, tp_size=tp)
    ranks = [written_ranges(config, rank) for rank in range(pp * tp)]
    end = max(part.start + part.size for _, parts in ranks for part in parts)
    picture = Svg(WIDTH, LINE + 12 + (pp + 1) * (2 * LINE + bar + 16))
    for rank in range(pp * tp):
        picture.box(220 * rank, 0, 18, 18, RANKS[rank])
        picture.text(220 * rank + 25, 15, f"written by rank {rank}")

    def draw(top: float, title: str, stage: int, first: int, last: int, name_of: Callable[[str], str]) -> None:
        """Draw the bytes from `first` to `last` of a file over the whole width, with names below."""
        scale = (WIDTH - 2 * left) / (last - first)
        picture.text(0, top + 16, title, "title")
        y = top + LINE
        for rank in range(stage * tp, (stage + 1) * tp):
            for part in ranks[rank][1]:
                start, stop = max(part.start, first), min(part.start + part.size, last)
                if start < stop:
                    hover = f"rank {rank}: bytes {part.start:,} to {part.start + part.size:,}"
                    width = (stop - start) * scale
                    picture.box(left + (start - first) * scale, y, width, bar, RANKS[rank], title=hover)
        for name, tensors in itertools.groupby(ranks[stage * tp][0], lambda each: name_of(each.name)):
            start = next(tensors).start
            if name and first <= start < last:
                x = left + (start - first) * scale
                picture.line(x, y, x, y + bar + 18)
                picture.text(x + 4, y + bar + 18, name)

    tops = [LINE + 12 + i * (2 * LINE + bar + 16) for i in range(pp + 1)]
    slices = ranks[0][0]
    starts = [each.start for each in slices if part_of_model(each.name) == zoomed]
    after = min(each.start for each in slices if each.start > starts[-1])
    draw(tops[0], f"{slices[0].file}: {end / 2**20:.2f} MiB", 0, 0, end, part_of_model)
    draw(tops[1], f"{zoomed} of this file, enlarged", 0, starts[0], after, matrix)
    draw(tops[2], f"{ranks[tp][0][0].file}, to the scale of the first file", 1, 0, end, part_of_model)
    return str(picture)


if __name__ == "__main__":
    main(__doc__, overview, batch, checkpoint_files)
