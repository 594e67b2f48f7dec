"""Recomputing the activations of some micro-batches only, in both loops and in the executor."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from tests.support.oracle import tiny_llama
from tests.support.training import Loader, batches, pipeline_config, step_of, wrapped
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.plan import kept_activations
from workbench.schedules.schedules import SCHEDULES, build

FULL = {"training__activation_checkpointing": "full"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("limit", [1, 3])
def test_never_more_than_the_limit_are_kept_at_a_time(name: str, limit: int) -> None:
    for program in build(name, 4, 8).programs:
        kept, in_flight, peaks = kept_activations(program, limit), set(), [0, 0]
        for action in program:
            for part in action.parts[::-1]:
                unit = {(part.stage, part.micro_batch)}
                in_flight = in_flight | unit if part.kind == "F" else in_flight - unit
                peaks = [max(peaks[0], len(in_flight)), max(peaks[1], len(in_flight & kept))]
        assert peaks[1] == min(limit, peaks[0])
    assert kept_activations(program, 10**6) == {(s, i) for s in build(name, 4, 8).stages_of(3) for i in range(8)}


def counted_step(config: Config, model_config: LlamaConfig) -> dict[str, int]:
    """Return how often each layer of this rank ran its forward in a step."""
    model = wrapped(config, model_config)
    counts = dict.fromkeys(model.module.module.model.layers, 0)

    def counter(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    for name, layer in model.module.module.model.layers.items():
        layer.mlp.register_forward_pre_hook(counter(name))
    step_of(config, model_config)(model, Loader(batches(config.training.gradient_accumulation_steps)))
    return counts


@pytest.mark.parametrize("engine", ["1f1b", "zbv"])
def test_layers_of_other_micro_batches_run_twice(pool: WorkerPool, engine: str) -> None:
    config = pipeline_config(engine, 2, pp_keep_activations=1, **FULL)
    model_config = tiny_llama(num_hidden_layers=4)
    plan = plan_pipeline(config, model_config)
    for rank, counts in enumerate(pool.run(counted_step, 2, config, model_config)):
        kept = [stage for stage, _ in plan.kept_activations(rank)]
        for number, stage in plan.stages_of(rank).items():
            for layer in stage.layers:
                assert counts[str(layer)] == 2 * 3 - kept.count(number)
