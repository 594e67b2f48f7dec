"""Costs of ZeRO: bytes sent and held equal the formulas, and full weights exist only while they are used; and tied
vectors.
"""

import functools
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.model.families import part_parameters
from picotron.model.placement import placement
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import loader_of, step_of, wrapped
from tests.workbench.explain.test_explain import total
from workbench.explain.explain import run_stages
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.modules import Pipeline
from workbench.schedules.schedules import build
from workbench.variants.zero1 import DataParallelZero1
from workbench.variants.zero3 import Unit

pytestmark = pytest.mark.usefixtures("_no_grid_is_left")

MICRO_BATCHES, LAYERS = 3, 4
MODEL = tiny_llama(num_hidden_layers=LAYERS)
LAYER, EMBEDDING, HEAD = part_parameters(MODEL)
ALL = EMBEDDING + LAYERS * LAYER + HEAD


def test_weights_are_gathered_once_per_step_in_a_pipeline() -> None:
    config = make_config(f"dp2 pp2 zero3 bfloat16 m{MICRO_BATCHES}")
    for step in run_stages(config, MODEL, plan_pipeline(config, MODEL)):
        parameters = 2 * step.parameters  # of which this rank holds half
        assert total(step, "cp_dp", lambda each: each.size, operation="all-gather") == 2 * parameters
        reduced = total(step, "cp_dp", lambda each: each.size, operation="reduce-scatter")
        assert reduced == MICRO_BATCHES * 4 * parameters


def full_weights(config: Config, model_config: LlamaConfig) -> tuple[int, int]:
    """Return the most bytes of full weights that exist at the same time in a step, and those after the step."""
    model, most = wrapped(config, model_config), 0
    start_gather = Unit.start_gather

    def existing() -> int:
        return sum(unit.full.untyped_storage().nbytes() for unit in model.units)

    def watched(unit: Unit) -> None:
        nonlocal most
        start_gather(unit)
        most = max(most, existing())

    assert existing() == 0
    with mock.patch.object(Unit, "start_gather", watched):
        step_of(config, model_config)(model, loader_of(config))
    return most, existing()


@pytest.mark.parametrize("checkpointing", ["", "full"])
def test_full_weights_of_two_units_exist_at_the_same_time(pool: WorkerPool, checkpointing: str) -> None:
    """Those of the unit that computes and of the one after it, in forward and in backward."""
    config = make_config(f"dp2 zero3 m3 {checkpointing}")
    for most, after in pool.run(full_weights, 2, config, MODEL):
        assert most == 8 * (LAYER + max(LAYER, EMBEDDING, HEAD))
        assert after == 0


def graphs_of_compiled_layers(config: Config) -> dict[str, int]:
    """Run two steps with compiled layers. Returns torch's counters of graphs and graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch("torch.compile", functools.partial(torch.compile, backend="eager")):
        model = wrapped(config, MODEL)
    step, loader = step_of(config, MODEL), loader_of(config)
    for _ in range(2):
        model.zero_grad()
        step(model, loader)
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": counters["graph_break"].total()}


def test_all_layers_share_one_compiled_graph_and_the_loss_has_another(pool: WorkerPool) -> None:
    """The hooks that gather weights are not compiled."""
    config = make_config("dp2 zero3 m3", training__compile=True)
    assert pool.run(graphs_of_compiled_layers, 2, config) == [{"graphs": 2, "breaks": 0}] * 2


def second_tied_vector() -> tuple[tuple[int, int], str | None]:
    """Return the elements that this rank owns of a vector that is tied to one of the other stage, and its shared name,
    by which bfloat16 states are rounded. On the first stage, a vector that is used twice precedes it.
    """
    setup_process_group_manager(1, 1, 2, 2)
    stages = {0: nn.Module(), 1: nn.Module()}
    for stage, name in ((0, "a"), (0, "c"), (0, "b"), (1, "d")):
        stages[stage].register_parameter(name, nn.Parameter(torch.zeros(5)))
    tied = [[(0, "a"), (0, "c")], [(0, "b"), (1, "d")]]
    pipeline = Pipeline(stages, lambda stage, batch: torch.empty(1, device="meta"), build("1f1b", 2, 2), tied)
    DataParallelZero1(pipeline)
    rank = pgm.process_group_manager.pp_rank
    place = placement(stages[rank].get_parameter("bd"[rank]))
    return place.owned.bounds(place.owned.rank), place.shared_name


def test_both_stages_own_the_same_elements_of_each_tied_vector_and_name_it_alike(pool: WorkerPool) -> None:
    found = pool.run(second_tied_vector, 4)
    assert (found[0], found[2]) == (found[1], found[3])  # dp 0, dp 1
    assert found[0][1] is not None
