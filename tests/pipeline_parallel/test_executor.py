"""The executor: every schedule equals one process. test_executor_order.py checks timing and memory."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from conformance.oracle import assert_close, assert_equals_training, tiny_llama
from conformance.training import Loader, all_stages, batches, layout_name, pipeline_config, step_of, train, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.pipeline_parallel.plan import training_schedule
from picotron.schedules.actions import Schedule
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import LOOPS, SCHEDULES, build
from picotron.schedules.search import KNOBS, SHAPES, Greedy
from picotron.schedules.simulate import Costs
from tests.pipeline_parallel.test_pipeline_parallel import check_evaluations, expected_step, expected_training

BY_PROGRAM = [name for name in SCHEDULES if name not in LOOPS]
MORE: list[dict[str, Any]] = [{}, {"dp_size": 2}, {"tp_size": 2}, {"cp_size": 2}]
LAYERS = {2: 5, 4: 9}
# A single micro-batch; fewer than stages; not a multiple of the stages; enough for a steady state.
MICRO_BATCHES = (1, 3, 5, 8)
# Each schedule on two pp ranks with another axis, and on four pp ranks alone (two schedules in test_parity.py). The
# fuzzer draws others.
CASES = [
    (
        engine,
        pp,
        MORE[1 + i % 3] if pp == 2 else {},
        MICRO_BATCHES[3 - (i + pp) % 4],
        (i + pp // 2) % 2 == 0,
        ("none", "full")[i % 2],
    )
    for i, engine in enumerate(BY_PROGRAM)
    for pp in (2, 4)
    if pp == 2 or engine not in ("interleaved_1f1b", "dualpipev")
]


@pytest.mark.parametrize(
    ("engine", "pp", "more", "micro_batches", "tied", "checkpointing"),
    CASES,
    ids=layout_name,
)
def test_five_steps_equal_one_process(
    pool: WorkerPool, engine: str, pp: int, more: dict[str, Any], micro_batches: int, tied: bool, checkpointing: str
) -> None:
    config = pipeline_config(
        engine,
        pp,
        micro_batches,
        training__activation_checkpointing=checkpointing,
        training__total_train_steps=5,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
        **more,
    )
    model_config = tiny_llama(num_hidden_layers=LAYERS[pp], tie_word_embeddings=tied)
    expected = expected_training(more.get("dp_size", 1) * micro_batches, model_config.num_hidden_layers, tied)
    for result in pool.run(train, config.distributed.world_size, config, model_config):
        assert_equals_training(result, expected)


def one_step(config: Config, model_config: LlamaConfig, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    """Return the loss and the gradients of the full model after one step."""
    model = wrapped(config, model_config, dtype)
    if compiled:
        for layer in model.module.module.model.layers.values():
            layer.compile(backend="aot_eager")
    items = batches(config.training.gradient_accumulation_steps)
    loss = step_of(config, model_config, dtype)(model, Loader(items)).double()
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(model.module.module, "main_grad")}


def check_step(pool: WorkerPool, config: Config, compiled: bool = False, **changes: Any) -> None:
    expected = expected_step(**changes)
    arguments = (config, tiny_llama(**changes), torch.float64, compiled)
    for result in pool.run(one_step, config.distributed.world_size, *arguments):
        assert_close(result["loss"], expected["loss"], what="loss")
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}


SEQUENCE_PARALLEL = {"tp_size": 4, "sequence_parallel": True}
SPLIT = list(itertools.product(("zb_h1", "zbv"), ({}, {"tp_size": 4}, SEQUENCE_PARALLEL), ("none", "full")))
SOME_SPLIT = [("zb_h1", {}, "full"), ("zbv", {"tp_size": 4}, "none"), ("zb_h1", SEQUENCE_PARALLEL, "none")]


@pytest.mark.parametrize(
    ("engine", "tensor_parallel", "checkpointing"),
    [pytest.param(*case, marks=[] if case in SOME_SPLIT else pytest.mark.slow) for case in SPLIT],
    ids=layout_name,
)
def test_split_backward_equals_transformers(
    pool: WorkerPool, engine: str, tensor_parallel: dict[str, Any], checkpointing: str
) -> None:
    """The model has biases. With more tp ranks than key/value heads, two ranks sum the gradients of a shared head."""
    tied = engine == "zbv"  # embedding and head are on the first pp rank
    config = pipeline_config(engine, 2, training__activation_checkpointing=checkpointing, **tensor_parallel)
    check_step(pool, config, num_hidden_layers=4, tie_word_embeddings=tied, **BIASES)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zbv", "looped_bfs"])
def test_compiled_layers_equal_transformers(pool: WorkerPool, engine: str) -> None:
    check_step(pool, pipeline_config(engine, 2), compiled=True, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("engine", "pp", "layout"),
    [
        ("1f1b", 4, "E|t*2|t*2|L"),
        ("afab", 3, "E|t*4|L"),
        ("zb_h1", 3, "Et|ttt|L"),
        ("interleaved_1f1b", 2, "E|tt||ttL"),
        ("zbv", 2, "|Ett|ttL|"),
        ("dualpipev", 2, "E|t|ttt|L"),
    ],
)
def test_pp_layouts_equal_transformers(pool: WorkerPool, engine: str, pp: int, layout: str) -> None:
    check_step(pool, pipeline_config(engine, pp, pp_layout=layout), num_hidden_layers=4, tie_word_embeddings=True)


def test_pp_chunks_equal_transformers(pool: WorkerPool) -> None:
    check_step(pool, pipeline_config("interleaved_1f1b", 2, pp_chunks=3), num_hidden_layers=6)
    check_step(pool, pipeline_config("looped_bfs", 3, pp_chunks=1), num_hidden_layers=3)
    check_step(pool, pipeline_config("zb_h1", 2, pp_chunks=3), num_hidden_layers=6)


def test_pp_group_size_equals_transformers(pool: WorkerPool) -> None:
    for engine in ("interleaved_1f1b", "zb_h1"):
        check_step(pool, pipeline_config(engine, 2, pp_chunks=2, pp_group_size=3), num_hidden_layers=4)


def test_searched_schedules_equal_transformers(pool: WorkerPool) -> None:
    """Room for one micro-batch is too little for any hand-made schedule, so these are new."""
    for layout in ("Et|tt|t|ttL", "Ettt|tttL"):
        config = pipeline_config("auto", 2, pp_memory=1, pp_layout=layout)
        check_step(pool, config, num_hidden_layers=6)


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


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i == 0 else pytest.mark.slow) for i in range(24)])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("engine", ["interleaved_1f1b", "looped_bfs"])
def test_full_backwards_equal_one_process_bit_for_bit(pool: WorkerPool, engine: str, dtype: torch.dtype) -> None:
    model_config = tiny_llama(num_hidden_layers=6)
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


@pytest.mark.parametrize("engine", SCHEDULES)
def test_evaluation_equals_transformers(pool: WorkerPool, engine: str) -> None:
    more = {"zbv": {"dp_size": 2}, "looped_bfs": {"tp_size": 2}, "dualpipev": {"cp_size": 2}}.get(engine, {})
    config = pipeline_config(
        engine, 2, 4 // more.get("dp_size", 1), training__eval_frequency=1, training__eval_steps=3, **more
    )
    check_evaluations(pool, config, tiny_llama(num_hidden_layers=4, tie_word_embeddings=True))
