"""ZeRO: the slices of tied vectors, and a run that resumes bit for bit."""

from pathlib import Path

import torch
from torch import nn

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.data_parallel.owned_slices import owned_slice
from picotron.data_parallel.zero1 import DataParallelZero1
from picotron.process_group_manager import setup_process_group_manager
from tests.support.checkpoints import first_half, model_of, run, run_config, tensors_of
from workbench.pipelines.modules import Pipeline
from workbench.schedules.schedules import build


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
    owned = owned_slice(stages[pgm.process_group_manager.pp_rank].get_parameter("b"))
    return owned.bounds(owned.rank)


def test_both_stages_own_the_same_elements_of_each_tied_vector(pool: WorkerPool) -> None:
    bounds = pool.run(bounds_of_second_tied_vector, 4)
    assert (bounds[0], bounds[2]) == (bounds[1], bounds[3])  # dp 0, dp 1


def test_same_layout_resumes_bit_for_bit(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    layout = {"dp_size": 2, "pp_size": 2, "tp_size": 2, "dp_engine": "zero3"}
    keys, model = {"model__dtype": "bfloat16"}, model_of(True)
    whole = run(pool, run_config(tmp_path / "whole", layout, **keys), model, tokenizer)
    run(pool, first_half(tmp_path / "run", layout, **keys), model, tokenizer)
    result = run(pool, run_config(tmp_path / "run", layout, checkpoint__load_path="latest", **keys), model, tokenizer)
    assert result["losses"] == whole["losses"][5:]
    for kind in ("model", "exp_avg", "exp_avg_sq", "master"):
        ours, theirs = (tensors_of(tmp_path / name / "step_00000010", kind) for name in ("run", "whole"))
        assert ours.keys() == theirs.keys() == whole["weights"].keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
