"""Recomputing the activations of some micro-batches only, in both loops and in the executor."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig

from conformance.oracle import assert_close, tiny_llama
from conformance.training import Loader, all_stages, batches, pipeline_config, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.pipeline_parallel.plan import kept_activations, plan_pipeline
from picotron.schedules.schedules import SCHEDULES, build
from tests.pipeline_parallel.test_pipeline_parallel import expected_step

FULL = {"training__activation_checkpointing": "full"}


@pytest.mark.parametrize(("pp", "micro_batches", "limit"), list(itertools.product((2, 3, 4), (1, 3, 8), (0, 1, 2, 5))))
def test_1f1b_keeps_the_first_micro_batches_of_each_window(pp: int, micro_batches: int, limit: int) -> None:
    """A window has as many micro-batches as are in flight, as in Megatron-LM (pipeline_parallel/schedules.py):
    `i % max_outstanding_backprops >= num_microbatches_with_partial_activation_checkpoints` recomputes micro-batch i.
    """
    for rank, program in enumerate(build("1f1b", pp, micro_batches).programs):
        window = min(pp - rank - 1, micro_batches) + 1
        expected = {(rank, i) for i in range(micro_batches) if i % window < limit}
        assert kept_activations(program, limit) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("limit", [1, 2, 3])
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


def counted_step(config: Config, model_config: LlamaConfig) -> dict[str, Any]:
    """Return the loss and the gradients of a step, and how often each layer of this rank ran its forward."""
    model = wrapped(config, model_config)
    counts = dict.fromkeys(model.module.module.model.layers, 0)

    def counter(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    for name, layer in model.module.module.model.layers.items():
        layer.mlp.register_forward_pre_hook(counter(name))
    step = step_of(config, model_config)
    loss = step(model, Loader(batches(config.training.gradient_accumulation_steps))).double()
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(model.module.module, "main_grad"), "counts": counts}


@pytest.mark.parametrize(("engine", "keep"), [("1f1b", 1), ("zbv", 1)])
def test_layers_of_other_micro_batches_run_twice_and_gradients_equal_transformers(
    pool: WorkerPool, engine: str, keep: int
) -> None:
    config = pipeline_config(engine, 2, pp_keep_activations=keep, **FULL)
    model_config = tiny_llama(num_hidden_layers=4)
    plan, expected = plan_pipeline(config, model_config), expected_step(num_hidden_layers=4)
    for rank, result in enumerate(pool.run(counted_step, 2, config, model_config)):
        kept = [stage for stage, _ in plan.kept_activations(rank)]
        for number, stage in plan.stages_of(rank).items():
            for layer in stage.layers:
                assert result["counts"][str(layer)] == 2 * 3 - kept.count(number)
        assert_close(result["loss"], expected["loss"], what="loss")
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)
