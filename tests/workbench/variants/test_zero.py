"""ZeRO: the slices of tied vectors."""

import torch
from torch import nn

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.model.placement import placement
from picotron.process_group_manager import setup_process_group_manager
from workbench.pipelines.modules import Pipeline
from workbench.schedules.schedules import build
from workbench.variants.zero1 import DataParallelZero1


def bounds_of_second_tied_vector() -> tuple[int, int]:
    """Return the elements that this rank owns of a vector that is tied to one of the other stage. On the first stage, a
    vector that is used twice precedes it.
    """
    setup_process_group_manager(1, 1, 2, 2)
    stages: dict[int, nn.Module] = {0: nn.Module(), 1: nn.Module()}
    for stage, name in ((0, "a"), (0, "c"), (0, "b"), (1, "b")):
        stages[stage].register_parameter(name, nn.Parameter(torch.zeros(5)))
    tied = [[(0, "a"), (0, "c")], [(0, "b"), (1, "b")]]
    pipeline = Pipeline(stages, lambda stage, batch: torch.empty(1, device="meta"), build("1f1b", 2, 2), tied)
    DataParallelZero1(pipeline)
    owned = placement(stages[pgm.process_group_manager.pp_rank].get_parameter("b")).owned
    return owned.bounds(owned.rank)


def test_both_stages_own_the_same_elements_of_each_tied_vector(pool: WorkerPool) -> None:
    bounds = pool.run(bounds_of_second_tied_vector, 4)
    assert (bounds[0], bounds[2]) == (bounds[1], bounds[3])  # dp 0, dp 1
