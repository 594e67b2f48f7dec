"""The executor frees and recomputes activations, and reduces gradients, at the actions that the schedule specifies; it
runs a schedule from a file, and gradients in bfloat16.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.placement import placement
from tests.support.oracle import assert_close, tiny_llama
from tests.support.training import CPU, Loader, all_stages, batches, pipeline_config, step_of, wrapped
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.executor import MAX_SENDS_IN_FLIGHT, Executor, StepState
from workbench.pipelines.plan import kept_activations
from workbench.pipelines.planning import training_schedule
from workbench.schedules.actions import Action
from workbench.schedules.checker import add_communication
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.simulate import peak_activations


def run_observed(executor: Executor, model: DataParallel, observe: Any) -> None:
    """Run one step, calling `observe(action)` after each action."""
    run = StepState.run

    def observed(step: StepState, action: Any) -> None:
        run(step, action)
        observe(action)

    items = batches(executor.schedule.micro_batches)
    with mock.patch.object(StepState, "run", observed):
        executor(model, Loader(items), CPU)


def alive(storages: list[Any]) -> int:
    return sum(storage() is not None for storage in storages)


def live_activations(config: Config, model_config: LlamaConfig) -> tuple[Any, Any]:
    """Run one step, and record after each action which activations and how many sent outputs are in memory.

    Returns:
        For each action, the set of (stage, micro-batch) with activations saved for autograd or for a later W, and the
        number of live outputs for other ranks; then the program of this rank.
    """
    model, executor = wrapped(config, model_config), Executor(training_schedule(config))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[tuple[int, int], list[Any]] = {}
    outputs: list[Any] = []
    forward, rank = StepState.forward, pgm.process_group_manager.pp_rank

    def observed_forward(step: StepState, action: Action) -> None:
        key = action.stage, action.micro_batch
        kept[key] = []

        def pack(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
                kept[key].append(weakref.ref(tensor.untyped_storage()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(step, action)
        if action in step.results and step.schedule.rank_of(action.stage + 1) != rank:
            outputs.append(weakref.ref(step.results[action][0].untyped_storage()))

    seen = []

    def observe(action: Any) -> None:
        seen.append(({key for key, storages in kept.items() if alive(storages)}, alive(outputs)))

    with mock.patch.object(StepState, "forward", observed_forward):
        run_observed(executor, model, observe)
    return seen, executor.program


@pytest.mark.parametrize("engine", ["looped_bfs", "zb_h1", "zbv", "dualpipev"])
def test_activation_lifetimes_match_the_schedule(pool: WorkerPool, engine: str) -> None:
    model_config, config = tiny_llama(num_hidden_layers=6), pipeline_config(engine, 3, 7)
    programs = training_schedule(config).programs
    for rank, (seen, program) in enumerate(pool.run(live_activations, 3, config, model_config)):
        live: set[tuple[int, int]] = set()
        peak, receivers = 0, 2 if SCHEDULES[engine].placement == "V" else 1  # one in each direction of the V
        for action, (really, outputs) in zip(program, seen, strict=True):
            for part in action.parts:
                if part.kind in "FBW":
                    (live.add if part.kind == "F" else live.discard)((part.stage, part.micro_batch))
            assert really == live, f"after {action} on rank {rank}"
            assert outputs <= 1 + MAX_SENDS_IN_FLIGHT * receivers
            peak = max(peak, len(live))
        pairs = any(len(action.parts) == 2 for action in program)  # the executor runs their actions one after the other
        assert peak in (peak_activations(programs[rank]), peak_activations(programs[rank]) - pairs)


def reductions(config: Config, model_config: LlamaConfig) -> tuple[list[str], int]:
    """Return the actions and bucket launches of a step, in the order they finish, and the number of buckets."""
    model, executor = wrapped(config, model_config), Executor(training_schedule(config))
    events: list[str] = []
    for bucket in model.buckets:
        launch, stage = bucket.launch, placement(bucket.parameters[0]).stage
        bucket.launch = lambda launch=launch, stage=stage: (events.append(f"launch {stage}"), launch())
    run_observed(executor, model, lambda action: events.append(str(action)))
    return events, len(model.buckets)


@pytest.mark.parametrize("engine", ["interleaved_1f1b", "zbv"])
def test_each_stage_reduces_once_at_its_reduce_action(pool: WorkerPool, engine: str) -> None:
    config = pipeline_config(engine, 2, 4, dp_size=2)
    programs = add_communication(training_schedule(config))
    for rank, (events, buckets) in enumerate(
        pool.run(reductions, 4, config, tiny_llama(num_hidden_layers=4, tie_word_embeddings=True))
    ):
        assert [event for event in events if "launch" not in event] == list(map(str, programs[rank % 2]))
        stages = [event[:-1] for event in events if event.endswith("R")]
        assert [event for event in events if "launch" in event] == [f"launch {stage}" for stage in stages]
        assert buckets == len(stages) == len(set(stages))
        for stage in stages:
            assert events[events.index(f"{stage}R") - 1] == f"launch {stage}"
        if len(stages) == 2:
            assert events.index(f"{stages[0]}R") < len(events) - 3  # other stages still compute


BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}


def one_step(config: Config, model_config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the loss and the gradients of the full model after one step."""
    model = wrapped(config, model_config, dtype)
    items = batches(config.training.gradient_accumulation_steps)
    loss = step_of(config, model_config, dtype)(model, Loader(items)).double()
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(model.module.module, "main_grad")}


def test_schedule_from_a_file_equals_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    """A V placement with three chunks, split and full backwards, and an overlapped pair."""
    path = tmp_path / "own.csv"
    path.write_text(
        "0F0,0F1,,3F0,4F0,3F1,4F1,0F2,4I0,3B0,(3F2;4B1),4W0,3I1,0B0,4F2,3W1,4B2,3B2,0B1,0B2\n"
        "1F0,2F0,1F1,2F1,5F0,5B0,5F1,5B1,2B0,1B0,1F2,2F2,5F2,5I2,2B1,5W2,1B1,2B2,1I2,1W2\n"
    )
    config = pipeline_config(f"csv:{path}", 2)
    assert training_schedule(config).placement == "V"
    model_config = tiny_llama(num_hidden_layers=6, tie_word_embeddings=True)
    (expected,) = pool.run(one_step, 1, pipeline_config("1f1b", 1), model_config, torch.float64)
    for result in pool.run(one_step, 2, config, model_config, torch.float64):
        assert_close(result["loss"], expected["loss"], what="loss")
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


def test_split_backward_in_bfloat16_is_close_to_full_backward(pool: WorkerPool) -> None:
    """This includes weights whose gradients are computed in a wider dtype."""
    model_config = tiny_llama(num_hidden_layers=4, **BIASES)
    results = [
        pool.run(one_step, 4, pipeline_config(engine, 2, tp_size=2), model_config, torch.bfloat16)[0]
        for engine in ("1f1b", "zb_h1")
    ]
    for name, gradient in results[0]["gradients"].items():
        assert_close(results[1]["gradients"][name], gradient, relative=0.02, what=name)


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
