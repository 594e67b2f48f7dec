"""ZeRO: ten steps equal those of one process, and checkpoints go from any dp_engine to any other."""

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from conformance.oracle import (
    assert_close,
    assert_equals_training,
    make_config,
    oracle_training,
    random_tokens,
    tiny_llama,
)
from conformance.training import layout_name, train, wrapped
from conformance.worker_pool import WorkerPool
from picotron import parallelize
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.data_parallel.owned_slices import owned_slice
from picotron.data_parallel.zero1 import DataParallelZero1
from picotron.optimizer import AdamW
from picotron.parallelize import unwrap
from picotron.pipeline_parallel.modules import Pipeline
from picotron.process_group_manager import setup_process_group_manager
from picotron.schedules.schedules import build
from tests.checkpoint.test_checkpoint import assert_equals_second_half
from tests.checkpoint.test_checkpoint_writer import train_while_writing
from tests.support import checkpoints, program
from tests.support.checkpoints import first_half, model_of, run, run_config, tensors_of
from tests.support.program import arguments, metrics

ENGINES = ("zero1", "zero3")
SP = {"sequence_parallel": True}
BIAS = {"attention_bias": True, "mlp_bias": True}
FOUR = {"training__gradient_accumulation_steps": 4, "training__micro_batch_size": 1}
FULL = {"training__activation_checkpointing": "full"}
TIED = {"tie_word_embeddings": True}
CORE: list[
    tuple[dict[str, Any], dict[str, Any]]
] = [  # changes of the config (without a section, of `distributed`), and of the model
    ({"dp_size": 2}, BIAS),
    ({"cp_size": 2}, TIED),
    ({"dp_size": 2, "tp_size": 2, **SP}, {"num_key_value_heads": 1, **BIAS}),  # tp ranks hold the same key/value head
    ({"dp_size": 2, "pp_size": 2}, TIED),
    (
        {"dp_size": 2, "pp_size": 2, "pp_engine": "zb_h1", **FOUR},
        {},
    ),  # gradients of norms come before those of matrices
]
MORE: list[tuple[dict[str, Any], dict[str, Any]]] = [  # compiled, or on more ranks than the fuzzer's cases
    ({"dp_size": 1}, {}),
    ({"dp_size": 2, "training__compile": True}, {}),
    ({"dp_size": 2, "tp_size": 2, **SP, **FULL, "training__compile": True}, TIED),
    ({"dp_size": 2, "tp_size": 4, **SP}, TIED),  # 61 tokens: the vocabulary is padded
    ({"dp_size": 2, "pp_size": 3, "pp_engine": "afab"}, TIED),
    ({"dp_size": 2, "pp_size": 2, "tp_size": 2, **SP, "pp_engine": "zb_h1"}, TIED),
    ({"dp_size": 2, "pp_size": 2, "cp_size": 2}, TIED),
]
MORE_SMALL = [("zero1", 25.0), ("zero3", 0.0)]  # engine, bucket_mb


def config_of(engine: str, layout: dict[str, Any], **changes: Any) -> Config:
    """Return a config whose step has eight sequences in every layout."""
    keys = {
        "training__micro_batch_size": 8 // (2 * layout.get("dp_size", 1)),
        "training__gradient_accumulation_steps": 2,
        "training__warmup_steps": 3,
        "training__max_grad_norm": 0.5,
        "training__weight_decay": 0.3,
        "dataset__shuffle": False,
    }
    layout = {key if "__" in key else f"distributed__{key}": value for key, value in layout.items()}
    return make_config(**{"distributed__dp_engine": engine, **keys, **layout, **changes})


def train_with_buckets(config: Config, model_config: LlamaConfig, bucket_mb: float) -> dict[str, Any]:
    small = functools.partial(DataParallelZero1, bucket_mb=bucket_mb)
    with mock.patch.object(parallelize, "DataParallelZero1", small):
        return train(config, model_config)


def assert_equals_one_process(pool: WorkerPool, config: Config, model_config: LlamaConfig, bucket_mb: float) -> None:
    expected = oracle_training(config, model_config, random_tokens())
    for result in pool.run(train_with_buckets, config.distributed.world_size, config, model_config, bucket_mb):
        assert_equals_training(result, expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("layout", "model"), [*CORE, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)], ids=layout_name
)
def test_ten_steps_equal_one_process(
    pool: WorkerPool, engine: str, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    layers = 2 * layout.get("pp_size", 1)
    model_config = tiny_llama(num_hidden_layers=layers, num_attention_heads=8, **model)
    assert_equals_one_process(pool, config_of(engine, layout), model_config, bucket_mb=0.02)


@pytest.mark.parametrize(("engine", "bucket_mb"), [("zero1", 0.0), *MORE_SMALL])
@pytest.mark.slow
def test_parameters_smaller_than_the_group_are_divided(pool: WorkerPool, engine: str, bucket_mb: float) -> None:
    """Vectors of four elements on eight ranks: in a bucket of their own, four of the ranks own none of them."""
    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
    model_config = tiny_llama(num_hidden_layers=1, vocab_size=61, **sizes, **BIAS)
    config = config_of(engine, {"dp_size": 8}, training__micro_batch_size=1, training__gradient_accumulation_steps=1)
    assert_equals_one_process(pool, config, model_config, bucket_mb)


def bounds_of_tied_matrix(config: Config, model_config: LlamaConfig, separate: bool) -> tuple[int, int]:
    """Return the elements of the embedding that this rank owns, with or without a separate bucket for it."""
    without = mock.patch("picotron.data_parallel.zero1.tied_parameters", return_value=set())
    with contextlib.nullcontext() if separate else without:
        embedding = unwrap(wrapped(config, model_config)).model.embed_tokens
    owned = owned_slice(embedding.weight)
    return owned.bounds(owned.rank)


def test_both_stages_own_the_same_elements_of_a_tied_matrix(pool: WorkerPool) -> None:
    """In a bucket with other parameters, they would not, and the sum of their gradients would be wrong."""
    config = config_of("zero1", {"dp_size": 2, "pp_size": 2})
    for separate in (True, False):
        bounds = pool.run(bounds_of_tied_matrix, 4, config, tiny_llama(**TIED), separate)
        assert (bounds[0] == bounds[1], bounds[2] == bounds[3]) == (separate, separate)  # dp 0, dp 1


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


@pytest.mark.slow
@pytest.mark.processes
def test_train_py_logs_the_same_losses(home: Path, tmp_path: Path) -> None:
    """With evaluations, checkpoints in the background, and a stop after two steps from which another engine resumes."""
    keys = {"checkpoint.save_frequency": 2, "checkpoint.async_save": "true", "checkpoint.load_path": "latest"}
    for name, max_tokens in (("zero1", 2 * 512), ("zero3", 4 * 512)):
        words = arguments(tmp_path / "both", 2, 2, **keys, **{"training.max_tokens": max_tokens})
        result = program.run(home, 2, *words, "--distributed.dp_engine", name)
        assert result.returncode == 0, result.stderr
    assert program.run(home, 2, *arguments(tmp_path / "bucket", 2, 2)).returncode == 0
    ours, theirs = (metrics(tmp_path / name) for name in ("both", "bucket"))
    assert len(ours) == len(theirs) == 4
    for field in ("loss", "grad_norm", "eval_loss"):
        found, expected = ([record[field] for record in records if field in record] for records in (ours, theirs))
        assert len(expected) == (2 if field == "eval_loss" else 4)
        assert_close(found, expected, what=field)


def owned_elements(config: Config, model_config: LlamaConfig) -> tuple[int, int, int]:
    """Return the number of elements whose state this rank's optimizer has, of all parameters, and of their padding."""
    model = wrapped(config, model_config)
    optimizer = AdamW(model.parameters(), config.training, fused=True)
    optimizer.restore(dict.fromkeys(optimizer.masters, 0), lambda parameter, name, tensor: None)
    states = [optimizer.state_of(parameter)["exp_avg"] for parameter in model.parameters()]
    numel = sum(parameter.numel() for parameter in model.parameters())
    padding = sum(len(bucket.buffer) - sum(p.numel() for p in bucket.parameters) for bucket in model.buckets)
    for parameter in model.parameters():  # each element belongs to exactly one rank
        owned, size = owned_slice(parameter), pgm.process_group_manager.cp_dp_world_size
        bounds = [owned.bounds(rank) for rank in range(size)]
        assert (bounds[0][0], bounds[-1][1]) == (0, parameter.numel())
        assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    return sum(state.numel() for state in states), numel, padding


def test_ranks_own_equal_shares_of_the_optimizer_state(pool: WorkerPool) -> None:
    results = pool.run(owned_elements, 4, config_of("zero1", {"dp_size": 2, "cp_size": 2}), tiny_llama())
    (numel,), (padding,) = ({result[i] for result in results} for i in (1, 2))
    assert sum(owned for owned, _, _ in results) == numel
    assert all(-(-numel // 4) - padding <= owned <= numel / 4 + padding for owned, _, _ in results)


# ---------------------------------------------------------------------------------------------------------- checkpoints

PATHS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp_size": 2, "pp_size": 2, "tp_size": 2, "dp_engine": "zero1"}, {"dp_size": 4, "dp_engine": "zero3"}),
]
MORE_PATHS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp_size": 2, "dp_engine": "zero3"}, {"tp_size": 4, **SP}),
    ({"dp_size": 2, "tp_size": 2}, {"cp_size": 2, "tp_size": 2, **SP, "dp_engine": "zero1"}),
    ({"dp_size": 2, "tp_size": 4, **SP, "dp_engine": "zero1"}, {"pp_size": 2, "dp_size": 2, "dp_engine": "naive"}),
    ({"pp_size": 2, "cp_size": 2, "dp_engine": "zero3"}, {"dp_size": 2, "tp_size": 4, **SP, "dp_engine": "zero3"}),
    ({"dp_size": 4, "dp_engine": "zero3"}, {"dp_size": 2, "pp_size": 2, "tp_size": 2, "dp_engine": "zero1"}),
]


@pytest.mark.parametrize(
    ("first", "second"), [*PATHS, *(pytest.param(*p, marks=pytest.mark.slow) for p in MORE_PATHS)], ids=layout_name
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_checkpoints_go_from_any_engine_to_any_other(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], tied: bool
) -> None:
    run(pool, first_half(tmp_path / "first", first), model_of(tied), tokenizer)
    half = str(tmp_path / "first/step_00000005")
    result = run(pool, run_config(tmp_path / "second", second, checkpoint__load_path=half), model_of(tied), tokenizer)
    assert_equals_second_half(result, model_of(tied))


@pytest.mark.parametrize("engine", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.slow)])
def test_same_layout_resumes_bit_for_bit(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path, engine: str, dtype: str
) -> None:
    layout = {"dp_size": 2, "pp_size": 2, "tp_size": 2, "dp_engine": engine}
    keys, model = {"model__dtype": dtype}, model_of(True)
    whole = run(pool, run_config(tmp_path / "whole", layout, **keys), model, tokenizer)
    run(pool, first_half(tmp_path / "run", layout, **keys), model, tokenizer)
    result = run(pool, run_config(tmp_path / "run", layout, checkpoint__load_path="latest", **keys), model, tokenizer)
    assert result["losses"] == whole["losses"][5:]
    for kind in ("model", "exp_avg", "exp_avg_sq", "master"):
        ours, theirs = (tensors_of(tmp_path / name / "step_00000010", kind) for name in ("run", "whole"))
        assert (
            ours.keys()
            == theirs.keys()
            == (set() if (kind, dtype) == ("master", "float64") else whole["weights"].keys())
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("engine", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_asynchronous_checkpoints_equal_synchronous_ones(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path, engine: str
) -> None:
    layout, model = {"dp_size": 2, "tp_size": 2, "dp_engine": engine}, model_of(False)
    for name, function in (("sync", checkpoints.train), ("async", train_while_writing)):
        keys = {"checkpoint__save_frequency": 1, "checkpoint__async_save": name == "async", "model__dtype": "bfloat16"}
        config = run_config(tmp_path / name, layout, training__total_train_steps=4, **keys)
        pool.run(function, 4, config, model, tokenizer)
    for step in range(1, 5):
        for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
            ours, theirs = (tensors_of(tmp_path / name / f"step_{step:08d}", kind) for name in ("async", "sync"))
            assert ours.keys() == theirs.keys() != set()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs), (step, kind)
