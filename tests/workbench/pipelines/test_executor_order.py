"""The executor frees activations and reduces gradients at the actions that the schedule specifies."""

import re
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.placement import placement
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import CPU, batches, wrapped
from workbench.pipelines.engine import BatchList
from workbench.pipelines.executor import MAX_SENDS_IN_FLIGHT, Executor, StepState
from workbench.pipelines.plan import kept_activations
from workbench.pipelines.planning import training_schedule
from workbench.schedules.actions import Action
from workbench.schedules.checker import add_communication
from workbench.schedules.schedules import SCHEDULES, build


def run_observed(executor: Executor, model: DataParallel, observe: Any) -> None:
    """Run one step, calling `observe(action)` after each action."""
    run = StepState.run

    def observed(step: StepState, action: Any) -> None:
        run(step, action)
        observe(action)

    items = batches(executor.schedule.micro_batches)
    with mock.patch.object(StepState, "run", observed):
        executor(model, BatchList(items), CPU)


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
    kept = {}
    outputs = []
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
    model_config, config = tiny_llama(num_hidden_layers=6), make_config(f"pp3 {engine} m7")
    receivers = 2 if SCHEDULES[engine].placement == "V" else 1  # one in each direction of the V
    for rank, (seen, program) in enumerate(pool.run(live_activations, 3, config, model_config)):
        live = set()
        for action, (really, outputs) in zip(program, seen, strict=True):
            for part in action.parts:
                if part.kind in "FBW":
                    (live.add if part.kind == "F" else live.discard)((part.stage, part.micro_batch))
            assert really == live, f"after {action} on rank {rank}"
            assert outputs <= 1 + MAX_SENDS_IN_FLIGHT * receivers


def reductions(config: Config, model_config: LlamaConfig) -> tuple[list[str], int]:
    """Return the actions and bucket launches of a step, in the order they finish, and the number of buckets."""
    model, executor = wrapped(config, model_config), Executor(training_schedule(config))
    events = []
    for bucket in model.buckets:
        launch, stage = bucket.launch, placement(bucket.parameters[0]).stage
        bucket.launch = lambda launch=launch, stage=stage: (events.append(f"launch {stage}"), launch())
    run_observed(executor, model, lambda action: events.append(str(action)))
    return events, len(model.buckets)


@pytest.mark.parametrize("engine", ["interleaved_1f1b", "zbv"])
def test_each_stage_reduces_once_at_its_reduce_action(pool: WorkerPool, engine: str) -> None:
    config = make_config(f"pp2 dp2 {engine} m4")
    programs = add_communication(training_schedule(config))
    for rank, (events, buckets) in enumerate(
        pool.run(reductions, 4, config, tiny_llama(num_hidden_layers=4, tie_word_embeddings=True))
    ):
        program = ",".join(map(str, programs[rank % 2]))
        assert ",".join(events) == re.sub(r"(\d)R\b", r"launch \1,\1R", program)
        launches = [event for event in events if "launch" in event]
        assert buckets == len(launches)
        if buckets == 2:
            assert events.index(launches[0]) < len(events) - 4  # other stages still compute


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
