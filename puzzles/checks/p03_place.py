"""Check of puzzle 3: the micro-batches that the data loader gives each rank."""

from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist

from docs.programs.svg import colour_of
from picotron.data.loader import MicroBatchDataLoader, TextRows
from puzzles.group import Group
from puzzles.pictures import Cell, rows
from puzzles.report import RED, Report
from workbench.explain.fake_group import fake_rank
from workbench.run.config_reader import load_config

Place = tuple[int, int, int, int]
STEPS = 2
NAMES = ("the step", "the micro-batch", "the dp rank", "the row")


def places(B: int, m: int, dp: int) -> dict[int, Place]:
    """Return the place of each sample of two steps, read from the loaders of all ranks."""
    sizes = {"micro_batch_size": B, "gradient_accumulation_steps": m, "seq_length": 4}
    options = [word for key, value in sizes.items() for word in (f"--training.{key}", str(value))]
    config = load_config(["--config", "docs/small.json", *options, "--distributed.dp_size", str(dp)])
    numbers = np.arange(STEPS * B * m * dp).repeat(4)  # each token of sample n is n
    found = {}
    for rank in range(dp):
        with fake_rank(rank, config.distributed):
            loader = MicroBatchDataLoader(
                TextRows(np.append(numbers, 0), 4), config, torch.device("cpu"), shuffle=False
            )
            for i in range(STEPS * m):
                for row, sample in enumerate(next(loader)["input_ids"][:, 0].tolist()):
                    found[sample] = (i // m, i % m, rank, row)
    return found


def check(learner: ModuleType, group: Group, report: Report) -> None:
    dist.destroy_process_group()  # the loaders get one of their own
    example = (2, 4, 2)  # of the statement: first for its sentence, last for its picture
    for B, m, dp in (example, (1, 3, 4), (3, 1, 2), (4, 2, 1), example):
        expected = places(B, m, dp)
        results, calls = {}, {}
        for sample in expected:
            results[sample] = report.ask(learner, "place", sample, B=B, m=m, dp=dp)
            calls[sample] = report.case
        report.picture = draw(results, expected, B, m, dp)
        for sample, place in expected.items():
            group.expect(results[sample], place, calls[sample], NAMES)


def draw(results: dict[int, Place], expected: dict[int, Place], B: int, m: int, dp: int) -> str:
    lines = []
    for rank in range(dp):
        cells = []
        for i in range(STEPS * m):
            for row in range(B):
                at = (i // m, i % m, rank, row)
                sample = next(number for number, place in expected.items() if place == at)
                yours = results[sample]
                right = isinstance(yours, tuple | list) and tuple(yours) == at
                title = f"sample {sample}: expected {at}, yours {yours}"
                cells.append(Cell(str(sample), colour_of(i % m) if right else RED, 1, title))
            cells.append(Cell("", "none", 0.3 if (i + 1) % m else 1))
        lines.append((f"dp rank {rank}", cells))
    return rows(
        f"Samples of {STEPS} steps with B = {B}, m = {m}, dp = {dp}, where the loader uses them",
        lines,
        "A colour for each micro-batch of a step; red: your place differs. Hover over a box to see both.",
    )
