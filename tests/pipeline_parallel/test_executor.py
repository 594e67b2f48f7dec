"""The executor: schedules that nobody wrote equal one process. test_executor_order.py checks timing and memory."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.oracle import assert_close, tiny_llama
from conformance.training import pipeline_config
from conformance.worker_pool import WorkerPool
from picotron.pipeline_parallel.plan import training_schedule
from picotron.schedules.actions import Schedule
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import build
from picotron.schedules.search import KNOBS, SHAPES, Greedy
from picotron.schedules.simulate import Costs
from tests.pipeline_parallel.test_pipeline_parallel import check_step, one_step

BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}


@pytest.mark.slow
def test_compiled_layers_equal_transformers(pool: WorkerPool) -> None:
    check_step(pool, pipeline_config("zbv", 2), compiled=True, num_hidden_layers=4)


def random_schedule(seed: int) -> Schedule:
    """Return a valid schedule that nobody would write: random shape, limit of memory and times."""
    draw = random.Random(seed)
    shape = draw.choice([*SHAPES, (3, "loop")])
    weights = [draw.uniform(0.1, 3) for _ in range(2 * shape[0])]
    costs = Costs(F=1, I=draw.uniform(0.2, 3), W=draw.uniform(0.2, 3), p2p=draw.uniform(0, 2), weights=weights)
    greedy = Greedy(Schedule([[], []], 3, *shape), draw.randint(1, 3), costs, deferred=1.0)
    schedule = greedy.run(draw.choice(KNOBS), stop=math.inf)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_equal_transformers(pool: WorkerPool, tmp_path: Path, seed: int) -> None:
    schedule = random_schedule(seed)
    (tmp_path / "own.csv").write_text(as_csv(schedule.programs))
    config = pipeline_config(f"csv:{tmp_path}/own.csv", 2)
    check_step(pool, config, num_hidden_layers=6, tie_word_embeddings=seed % 2 == 0)


def test_schedule_from_a_file_equals_transformers(pool: WorkerPool, tmp_path: Path) -> None:
    """A V placement with three chunks, split and full backwards, and an overlapped pair."""
    path = tmp_path / "own.csv"
    path.write_text(
        "0F0,0F1,,3F0,4F0,3F1,4F1,0F2,4I0,3B0,(3F2;4B1),4W0,3I1,0B0,4F2,3W1,4B2,3B2,0B1,0B2\n"
        "1F0,2F0,1F1,2F1,5F0,5B0,5F1,5B1,2B0,1B0,1F2,2F2,5F2,5I2,2B1,5W2,1B1,2B2,1I2,1W2\n"
    )
    config = pipeline_config(f"csv:{path}", 2)
    assert training_schedule(config).placement == "V"
    check_step(pool, config, num_hidden_layers=6, tie_word_embeddings=True)
    path.write_text(as_csv(build("1f1b", 2, 3).programs))  # 1F1B, which has a hand-written loop as well
    check_step(pool, config, num_hidden_layers=6)


@pytest.mark.parametrize("engine", ["1f1b", "interleaved_1f1b"])
def test_full_backwards_equal_one_process_bit_for_bit(pool: WorkerPool, engine: str) -> None:
    model_config, dtype = tiny_llama(num_hidden_layers=6), torch.bfloat16
    (whole,) = pool.run(one_step, 1, pipeline_config("1f1b", 1), model_config, dtype, False)
    for result in pool.run(one_step, 3, pipeline_config(engine, 3), model_config, dtype, False):
        assert result["loss"].float() == whole["loss"].float()
        for name, gradient in whole["gradients"].items():
            assert torch.equal(result["gradients"][name], gradient), name


def test_split_backward_in_bfloat16_is_close_to_full_backward(pool: WorkerPool) -> None:
    """This includes weights whose gradients are computed in a wider dtype."""
    model_config = tiny_llama(num_hidden_layers=4, **BIASES)
    results = [
        pool.run(one_step, 8, pipeline_config(engine, 2, tp_size=4), model_config, torch.bfloat16, False)[0]
        for engine in ("1f1b", "zb_h1")
    ]
    for name, gradient in results[0]["gradients"].items():
        assert_close(results[1]["gradients"][name], gradient, relative=0.02, what=name)
