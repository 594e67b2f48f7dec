"""Generation finishes under NCCL's rules, and takes as long as its schedule says."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from picotron.config import Config
from tests.support.nccl_programs import describe, recorded_rank
from tests.support.oracle import CPU, make_config, tiny_llama
from tests.workbench.pipelines.test_nccl_order import assert_finishes
from workbench.generation.rotation import Group, Rotation, generating
from workbench.generation.sampling import Sampling
from workbench.pipelines.engine import check_layout
from workbench.schedules.actions import Action
from workbench.schedules.generation import generation
from workbench.schedules.nccl_calls import Part, Program
from workbench.variants.choose import build_stage

pytestmark = pytest.mark.usefixtures("_no_grid_is_left")

ROUNDS = 4
LAYOUTS = [
    "pp3 interleaved_1f1b",
    "pp3 zbv",
    "pp2 dualpipev tp2 dp2",
]
allocate = Rotation.buffers


def zeros(rotation: Rotation, action: Action) -> list[Tensor]:
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
            mock.patch.object(Rotation, "buffers", zeros),
            mock.patch.object(dist, "broadcast", record_broadcast),
            torch.no_grad(),
        ):
            stage = build_stage(
                config, model_config, plan.wrap, CPU, torch.float64, lambda name, shape, i: torch.zeros(shape)[i]
            )
            schedule = generation(plan.schedule.pp, plan.schedule.pp, 1, plan.schedule.chunks, plan.schedule.placement)
            groups = [Group({0: [1, 2], 1: [3] * (i + 1)}, Sampling(ROUNDS), 0, CPU) for i in range(schedule.pp)]
            with generating(stage):
                Rotation(stage, schedule, groups, ROUNDS).run()
        programs.append(program)
    return programs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generation_finishes_on_nccl(layout: str) -> None:
    assert_finishes(programs_of(make_config(f"{layout} m4")))
