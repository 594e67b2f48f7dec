"""Generation finishes under NCCL's rules, and needs no collective for each token."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron.config import Config
from tests.support.nccl_programs import describe, recorded_rank, zeros
from tests.support.oracle import CPU, make_config, tiny_llama
from tests.workbench.pipelines.test_nccl_order import assert_finishes
from workbench.generation.rotation import Group, Rotation, generating
from workbench.generation.sampling import Sampling
from workbench.pipelines.engine import check_layout
from workbench.schedules.actions import Action
from workbench.schedules.generation import generation
from workbench.schedules.nccl_calls import Part, Program, operations
from workbench.variants.choose import build_stage

pytestmark = pytest.mark.usefixtures("_no_grid_is_left")

ROUNDS = 4
LAYOUTS = [
    "pp3 interleaved_1f1b",
    "pp3 zbv",
    "pp2 dualpipev tp2 dp2",
]
allocate = Rotation.buffers


def empty_buffers(rotation: Rotation, action: Action) -> list[Tensor]:
    return [torch.zeros_like(buffer) for buffer in allocate(rotation, action)]


def record_broadcast(tensor: Tensor, source: int, group: Any) -> None:
    group.record(Part("broadcast", describe(tensor))).wait()


def programs_of(config: Config) -> list[Program]:
    """Record all ranks, which receive zeros: the first token, with which no sequence ends."""
    programs, model_config = [], tiny_llama(num_hidden_layers=6)
    plan = check_layout(config, model_config)
    for rank in range(config.distributed.world_size):
        with (
            recorded_rank(rank, config) as program,
            mock.patch.object(Rotation, "buffers", empty_buffers),
            mock.patch.object(dist, "broadcast", record_broadcast),
            torch.no_grad(),
        ):
            stage = build_stage(config, model_config, plan.wrap, CPU, torch.float64, zeros)
            schedule = generation(plan.schedule.pp, plan.schedule.pp, 1, plan.schedule.chunks, plan.schedule.placement)
            groups = [Group({0: [1, 2], 1: [3] * (i + 1)}, Sampling(ROUNDS), 0, CPU) for i in range(schedule.pp)]
            with generating(stage):
                Rotation(stage, schedule, groups, ROUNDS).run()
        programs.append(program)
    return programs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_finishes_on_nccl(layout: str) -> None:
    assert_finishes(programs_of(make_config(f"{layout} m4")))


def calls_of(layout: str) -> list[Counter[str]]:
    """Return the numbers of collectives and of tensors sent and received, by name, of all ranks."""
    programs = programs_of(make_config(layout))
    return [Counter(part.operation for each in operations(program) for part in each.parts) for program in programs]


def test_no_collective_per_token() -> None:
    """The tokens that travel with the hidden states say which sequences have ended. With tensor parallelism, its layers
    add collectives, and the drawn tokens are broadcast.
    """
    forward, tokens = 2 * (1 + 2 * (ROUNDS - 1)), 2 * (ROUNDS - 1)  # of two groups
    first, last = {"send": forward, "receive": tokens}, {"send": tokens, "receive": forward}
    at_the_beginning = {"all-reduce (SUM)": 2}  # the first communication of a process group
    assert calls_of("pp2 dp2") == [first | at_the_beginning, last | at_the_beginning] * 2
    sums = 1 + 2 * 6  # of a forward: the embedding, and each attention and MLP
    each = {"all-reduce (SUM)": sums * ROUNDS, "all-gather": ROUNDS, "broadcast": ROUNDS}
    assert calls_of("tp2") == [each] * 2
