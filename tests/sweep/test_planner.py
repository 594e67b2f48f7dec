"""The search for the best layouts: equal to an evaluation of all, and fast enough for all layouts of 1,024 ranks."""

import time
from typing import Any

import pytest
from transformers import LlamaConfig

from picotron.config import Config
from picotron.console import UserError
from picotron.explain.estimate import GIB, rank_memory
from picotron.explain.forecast import forecast
from picotron.explain.hardware import HARDWARE
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.sweep.combinations import combinations
from picotron.sweep.planned_jobs import candidates, what_fits
from picotron.sweep.planner import best_configs

BASE: dict[str, Any] = {
    "distributed": {"use_cpu": False},
    "model": {"name": "docs/llama-3.1-70b", "dtype": "bfloat16"},
    "training": {"seq_length": 4096},
    "dataset": {"name": "python-stdlib"},
}


def of_ranks(
    count: int, batch: int, given: dict[str, list[Any]] | None = None, **model: Any
) -> list[tuple[dict[str, Any], Config]]:
    base = BASE | {"model": BASE["model"] | model}
    return list(candidates(base, combinations({"global_batch_size": [batch]} | (given or {}), [count], base)))


SMALL = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256,
)  # fmt: skip


INTERLEAVED: dict[str, list[Any]] = {
    "distributed.pp_engine": ["interleaved_1f1b"],
    "distributed.dp_engine": ["bucket"],
    "training.micro_batch_size": [1],
}


@pytest.mark.parametrize(
    ("gib", "given"),
    [
        (79.1, {}),
        (6.0, {}),
        (79.1, INTERLEAVED | {"distributed.pp_chunks": [4]}),
        (79.1, INTERLEAVED | {"distributed.pp_group_size": [2, 4]}),  # pp 4 and more need a larger group than 2
        (79.1, {"distributed.pp_keep_activations": [2], "distributed.dp_engine": ["bucket"]}),
    ],
    ids=["all", "memory", "chunks", "groups", "kept"],
)
def test_best_configs_are_those_of_an_evaluation_of_all(gib: float, given: dict[str, list[Any]]) -> None:
    tried = of_ranks(8, 16, given, num_hidden_layers=8, num_attention_heads=32)
    best, _ = best_configs(tried, SMALL, HARDWARE["H100"], gib, 4)
    seconds = []
    for i, (_, config) in enumerate(tried):
        try:
            plan = plan_pipeline(config, SMALL)
        except UserError:
            continue
        if max(memory.total for memory in rank_memory(config, SMALL, plan)) <= 0.92 * gib * GIB:
            seconds.append((forecast(config, SMALL, plan, HARDWARE["H100"]).step_time, i))
    assert len(seconds) >= 4
    assert best == [tried[i][0] for _, i in sorted(seconds)[:4]]


def test_if_nothing_fits_the_smallest_change_is_named() -> None:
    [(_, config)] = [each for each in of_ranks(1, 1, num_hidden_layers=8, num_attention_heads=32)
                     if each[1].training.activation_checkpointing == "none" and each[1].training.micro_batch_size == 1]  # fmt: skip
    needs = [memory.total / GIB for memory in rank_memory(config, SMALL, plan_pipeline(config, SMALL))]
    assert what_fits(config, SMALL, needs[0] / 0.92 - 0.1) == "it fits with activation_checkpointing full"
    assert "ranks" in what_fits(config, SMALL, needs[0] / 4)
    assert what_fits(config, SMALL, 0.1).startswith("neither recomputation nor ZeRO-3")


@pytest.mark.parity
def test_all_layouts_of_1024_ranks_take_less_than_30_seconds() -> None:
    from transformers import AutoConfig

    start = time.perf_counter()
    best, _ = best_configs(
        of_ranks(1024, 1024), AutoConfig.from_pretrained(BASE["model"]["name"]), HARDWARE["H100"], 79.1, 5
    )
    assert len(best) == 5
    assert time.perf_counter() - start < 30
