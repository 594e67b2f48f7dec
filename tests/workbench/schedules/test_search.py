"""The search for a schedule: results fit and run, nothing hand-made is faster, and bubbles are those of the paper."""

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zero_bubble import CASES, Case
from picotron.console import UserError
from tests.support.oracle import make_config, tiny_llama
from tests.support.program import run
from tests.workbench.drawing.test_draw import write_trace
from tests.workbench.schedules.test_schedules import assert_runs
from workbench.drawing.__main__ import main
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.plan import settings_of
from workbench.schedules import search
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import build
from workbench.schedules.search import Shape, fastest_schedule, hand_made
from workbench.schedules.simulate import Costs, memory_curves, peak_activations, simulate
from workbench.schedules.trace import settings_line, trace_path

LOOP = (1, "loop")
FEW_MOVES = mock.patch.object(search, "BUDGET", 40_000)  # for what holds after any number of moves


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.p == 8 and case.m < 64], ids=lambda case: f"{case.model}, m {case.m}"
)
def test_search_reaches_the_bubbles_of_the_zero_bubble_paper(case: Case) -> None:
    assert case.searched_rate(case.p) <= case.of_zb_1p + 5.1e-5
    assert case.searched_rate(2 * case.p) <= case.of_zb_2p + 4e-4


@settings(max_examples=12)
@given(
    pp=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    more=st.floats(1, 8),
    shape=st.sampled_from([(1, "loop"), (2, "loop"), (2, "V"), (3, "loop")]),
    deferred=st.sampled_from([0.0, 0.4, 1.0]),
    unit=st.sampled_from([1.0, 1e10]),
    data=st.data(),
)
@FEW_MOVES
def test_activations_of_unequal_stages_fit(
    pp: int, micro_batches: int, more: float, shape: Shape, deferred: float, unit: float, data: st.DataObject
) -> None:
    """The limit is `more` times what one micro-batch needs."""
    size = st.one_of(st.just(0.0), st.floats(0.1, 3))
    sizes = [unit * each for each in data.draw(st.lists(size, min_size=pp * shape[0], max_size=pp * shape[0]))]
    memory = more * max(sum(sizes[stage] for stage in own) for own in stages_of(pp, shape))
    costs = Costs(weights=data.draw(st.lists(st.floats(0.25, 2), min_size=len(sizes), max_size=len(sizes))), p2p=0.1)

    def peak(schedule: Schedule) -> float:
        timeline = dataclasses.replace(simulate(schedule, costs), sizes=sizes, deferred=deferred)
        return max(live for curve in memory_curves(timeline) for _, live in curve)

    found = fastest_schedule(pp, micro_batches, memory, {shape: costs}, deferred, sizes=sizes)
    assert_runs(found.schedule)
    assert found.bound * (1 - 1e-9) <= found.score == simulate(found.schedule, costs).step_time
    assert peak(found.schedule) <= memory * (1 + 1e-8)
    for schedule in hand_made(pp, micro_batches, shape).values():
        if peak(schedule) <= memory * (1 - 1e-8):
            assert found.score <= simulate(schedule, costs).step_time


def stages_of(pp: int, shape: Shape) -> list[list[int]]:
    """Return the stages of each rank."""
    empty = Schedule([[]] * pp, 1, *shape)
    return [empty.stages_of(rank) for rank in range(pp)]


@FEW_MOVES
def test_room_for_a_part_of_an_activation_changes_nothing() -> None:
    options = {(chunks, placement): Costs(weights=[1 / chunks] * 4 * chunks) for chunks, placement in search.SHAPES}
    found = [fastest_schedule(4, 8, memory, options) for memory in (3.5, 3.9)]
    assert found[0].schedule == found[1].schedule


@pytest.mark.processes
def test_all_processes_find_the_same_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of sets and dicts of strings differs between processes."""
    words = ["search", "--p2p", "0.3", "--memory", "3"]
    monkeypatch.setenv("COLUMNS", "160")
    main(words)
    other = run("-m", "workbench.drawing", *words, PYTHONHASHSEED="1").stdout
    assert capsys.readouterr().out == other
    assert other.startswith("search, ")


# ------------------------------------------------------------------------------------------------ config and draw


def auto_config(tmp_path: Path, **changes: Any) -> Any:
    if "pp_recording" in changes:
        changes["pp_recording"] = str(tmp_path)
        record(tmp_path)
    return make_config("pp2 auto m6", **changes)


def record(folder: Path) -> None:
    """Write the trace of a step of 1F1B on two ranks with six layers."""
    config, model_config = make_config("pp2"), tiny_llama(num_hidden_layers=6)
    write_trace(folder, 3, simulate(build("1f1b", 2, 4), Costs(weights=[1.0, 3.0])))
    first_line = settings_line(settings_of(config, model_config, plan_pipeline(config, model_config).stages))
    trace = trace_path(folder, 3)
    trace.write_text(f"{first_line}\n{trace.read_text()}")


@FEW_MOVES
def test_plan_of_a_config_is_searched(tmp_path: Path) -> None:
    plan = plan_pipeline(auto_config(tmp_path), tiny_llama(num_hidden_layers=6))
    assert plan.schedule.chunks == 2
    assert max(map(peak_activations, plan.schedule.programs)) <= 4
    one = plan_pipeline(auto_config(tmp_path, pp_max_activations=1.5), tiny_llama(num_hidden_layers=6))
    assert max(map(peak_activations, one.schedule.programs)) <= 3
    three = auto_config(tmp_path, pp_layout="Ett|t||t|tt|L")
    assert plan_pipeline(three, tiny_llama(num_hidden_layers=6)).schedule.chunks == 3


def test_plan_uses_the_times_of_a_recorded_run(tmp_path: Path) -> None:
    plan = plan_pipeline(auto_config(tmp_path, pp_recording=True), tiny_llama(num_hidden_layers=6))
    assert (plan.schedule.chunks, plan.schedule.micro_batches) == (1, 6)
    main(["search_measured", str(tmp_path), "--memory", "4"])


@pytest.mark.parametrize(
    ("changes", "sizes", "difference"),
    [
        ({"training__seq_length": 32}, {}, "training.seq_length=16, not 32"),
        ({"pp_layout": "Ett|ttttL"}, {}, "stages='Ettt|tttL', not 'Ett|ttttL'"),
        ({}, {"hidden_size": 64}, "hidden_size of the model=32, not 64"),
    ],
)
def test_a_recording_of_other_settings_is_rejected(
    changes: dict[str, Any], sizes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    config = auto_config(tmp_path, pp_recording=True, **changes)
    with pytest.raises(UserError, match=re.escape(difference)):
        plan_pipeline(config, tiny_llama(**{"num_hidden_layers": 6} | sizes))


@FEW_MOVES
def test_bound_is_the_least_step_time_of_simple_cases() -> None:
    """Work and the way of the first forward; one micro-batch; memory for one micro-batch; messages on its way."""
    for pp, m, memory, costs, least in (
        (2, 8, 2, Costs(), 25),
        (4, 1, 4, Costs(), 9),
        (4, 8, 1, Costs(), 72),
        (4, 1, 4, Costs(p2p=0.5), 12),
    ):
        found = fastest_schedule(pp, m, memory, {LOOP: costs})
        assert (found.score, found.bound, found.quality) == (least, least, "the best possible")
