"""The search for the best layouts: equal to an evaluation of all, and fast enough for all layouts of 1,024 ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from picotron.config import Config
from picotron.console import UserError
from workbench.explain.hardware import HARDWARE, USABLE, Hardware
from workbench.explain.step_time import forecast
from workbench.pipelines.engine import plan_pipeline
from workbench.schedules import search
from workbench.schedules.schedule_csv import as_csv
from workbench.schedules.schedules import build
from workbench.sweep.combinations import combinations
from workbench.sweep.planned_jobs import candidates
from workbench.sweep.planner import Planner, best_configs, layout_of

BASE = {
    "distributed": {"use_cpu": False},
    "model": {"name": "docs/llama-3.1-70b", "dtype": "bfloat16"},
    "training": {"seq_length": 4096},
    "dataset": {"name": "python-stdlib"},
}


def draw_space(seed: int, folder: Path) -> tuple[list[tuple[dict[str, Any], Config]], LlamaConfig, Hardware, float]:
    """Draw a model, a number of ranks, keys that are given, hardware and its memory."""
    draw = random.Random(seed)
    layers, seq = draw.choice([2, 4, 8, 9]), draw.choice([256, 1024, 2048])
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, vocab_size=draw.choice([32000, 128256]),
        tie_word_embeddings=draw.random() < 0.3, **sizes,
    )  # fmt: skip
    base = BASE | {"model": BASE["model"] | {k: v for k, v in sizes.items() if k != "num_key_value_heads"}}
    base |= {"training": {"seq_length": seq}}
    given = {"global_batch_size": [draw.choice([8, 16, 32])]}
    given |= {"distributed.tp_size": [1, draw.choice([2, 8])], "distributed.cp_size": [draw.choice([1, 1, 2])]}
    given["distributed.pp_size"] = draw.choice([[1, 2, 4, 8], [2, 4]])
    if draw.random() < 0.6:
        chunks = draw.choice([1, 2, 3])
        file = folder / f"{seed}.csv"
        file.write_text(as_csv(build("interleaved_1f1b", 2, 4, 2).programs))
        options = [
            {"distributed.pp_engine": ["afab", "zb_h1", "dualpipev", "looped_bfs"]},
            {"distributed.pp_engine": ["zb_h1", "interleaved_1f1b"], "schedule.pp_chunks": [chunks]},
            {"distributed.pp_engine": ["interleaved_1f1b"], "schedule.pp_group_size": [2, 4, 8]},
            {"schedule.pp_keep_activations": [2], "training.activation_checkpointing": ["full"]},
            {"distributed.pp_engine": ["auto"], "schedule.pp_max_activations": [1, 2], "distributed.pp_size": [2]},
            {"distributed.pp_engine": [f"csv:{file}"], "distributed.pp_size": [2]},
            {"schedule.pp_layout": [f"E|t*{layers}L", f"Et*{layers - 1}|tL"], "distributed.pp_size": [2]},
        ]
        given |= draw.choice(options)
    if draw.random() < 0.5:
        given["training.micro_batch_size"] = [1]
    if draw.random() < 0.3:
        given["distributed.dp_engine"] = ["naive", "zero1"]
    hardware = HARDWARE[draw.choice(list(HARDWARE))]
    gib = draw.choice([hardware.gib, 8.0, 4.0, 3.0, 1.0])
    return list(candidates(base, combinations(given, [8], base))), model, hardware, gib


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_an_evaluation_of_all_configs_finds(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each bound is at most the value."""
    monkeypatch.setattr(search, "BUDGET", 40_000)  # so that the schedules of `auto` are found sooner
    tried, model, hardware, gib = draw_space(seed, tmp_path)
    planner, fitting = Planner(model, hardware), []
    for i, (_, config) in enumerate(tried):
        try:
            plan = plan_pipeline(config, model)
        except UserError:
            continue
        seconds, needed = forecast(config, model, plan, hardware).step_time, planner.gib(config, plan)
        lower = planner.bounds(config)
        assert lower[0] <= seconds * (1 + 1e-12)
        assert lower[1] <= needed
        if needed <= USABLE * gib:
            fitting.append((seconds, i))
    best, _ = best_configs(tried, model, hardware, gib, 4)
    fastest = {}
    for _, i in sorted(fitting):
        fastest.setdefault(layout_of(tried[i][1]), tried[i][0])
    assert best == list(fastest.values())[:4]
