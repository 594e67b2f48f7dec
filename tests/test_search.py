"""The search for a schedule: results fit and run, nothing hand-made is faster, and bubbles are those of the paper."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron.errors import UserError
from picotron.schedules import draw
from picotron.schedules.actions import Action, parse_action
from picotron.schedules.plan import plan_pipeline
from picotron.schedules.recorded import message_time, recorded_costs
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.search import Shape, fastest_schedule, fits, hand_made, shapes
from picotron.schedules.simulate import Costs, Timeline, peak_activations, simulate
from tests.support.oracle import make_config, tiny_llama
from tests.support.zero_bubble import CASES, Case
from tests.test_draw import write_trace
from tests.test_schedules import assert_runs

LOOP: Shape = (1, "loop")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.p == 8 and case.m < 64 else pytest.mark.parity) for case in CASES],
    ids=lambda case: f"{case.model}, m {case.m}",
)
def test_search_reaches_the_bubbles_of_the_zero_bubble_paper(case: Case) -> None:
    assert case.searched_rate(case.p) <= case.of_zb_1p + 5.1e-5
    assert case.searched_rate(2 * case.p) <= case.of_zb_2p + (4e-4 if case.p < 32 else 3e-3)


times = st.floats(0.25, 4)


@settings(deadline=None, max_examples=60)
@given(
    pp=st.integers(1, 5),
    microbatches=st.integers(1, 12),
    memory=st.floats(1, 8),
    shape=st.sampled_from([(1, "loop"), (2, "loop"), (2, "V"), (3, "loop")]),
    times=st.tuples(times, times, times),
    p2p=st.sampled_from([0.0, 0.1, 1.0]),
    data=st.data(),
)
def test_schedule_fits_runs_and_nothing_hand_made_is_faster(
    pp: int, microbatches: int, memory: float, shape: Shape, times: tuple[float, ...], p2p: float, data: st.DataObject
) -> None:
    F, I, W = times  # noqa: E741
    weights = data.draw(st.lists(st.floats(0.25, 2), min_size=pp * shape[0], max_size=pp * shape[0]))
    costs = Costs(F=F, B=I + W, I=I, W=W, p2p=p2p, weights=weights)
    found = fastest_schedule(pp, microbatches, memory, {shape: costs})
    assert_runs(found.schedule)
    assert found.score == simulate(found.schedule, costs).step_time
    assert max(map(peak_activations, found.schedule.programs)) <= memory * shape[0]
    for schedule in hand_made(pp, microbatches, shape).values():
        if max(map(peak_activations, schedule.programs)) <= memory * shape[0]:
            assert found.score <= simulate(schedule, costs).step_time


@pytest.mark.parametrize(
    ("costs", "gain"), [(Costs(F=1, B=1.5, I=1, W=0.5, p2p=0.3), 3.9), (Costs(weights=[1, 1.6, 1, 0.8], p2p=0.1), 0.7)]
)
def test_search_beats_the_hand_made_schedules_if_messages_are_slow_or_stages_unequal(costs: Costs, gain: float) -> None:
    found = fastest_schedule(4, 8, 8, {LOOP: costs})
    assert found.name == "search"
    assert found.score < min(simulate(each, costs).step_time for each in hand_made(4, 8, LOOP).values()) - gain


def test_search_finds_schedules_for_less_memory_than_the_hand_made_ones() -> None:
    assert not any(fits(each, 2, 1.0) for each in hand_made(4, 8, LOOP).values())
    assert fastest_schedule(4, 8, 2, {LOOP: Costs()}).score < fastest_schedule(4, 8, 1, {LOOP: Costs()}).score


def test_with_memory_for_one_micro_batch_only_its_w_overlaps_other_ranks() -> None:
    assert fastest_schedule(4, 8, 1, {LOOP: Costs()}).score == 8 * (4 * (1 + 1) + 1)  # m (p (F + I) + W)


def test_more_memory_is_never_slower() -> None:
    scores = [fastest_schedule(4, 12, memory, {LOOP: Costs(p2p=0.1)}).score for memory in (1, 2, 3, 4, 6, 8, 12)]
    assert scores == sorted(scores, reverse=True)


def test_limit_below_one_micro_batch_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"a memory limit of 0\.5 micro-batches is too low: a pp rank holds at least one"
    ):
        fastest_schedule(2, 4, 0.5, {LOOP: Costs()})


def test_shapes_of_a_search() -> None:
    assert shapes(None) == [(1, "loop"), (2, "loop"), (2, "V")]
    assert shapes(2) == [(2, "loop"), (2, "V")]
    assert shapes(3) == [(3, "loop")]


@pytest.mark.processes
def test_all_processes_find_the_same_schedule() -> None:
    """The order of sets and dicts of strings differs between processes."""
    words = [sys.executable, "-m", "picotron.schedules.draw", "--schedule", "auto", "--p2p", "0.3", "--memory", "3"]
    printed = [
        subprocess.run(words, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] != ""
    assert printed[0].startswith("auto: search, ")


# -------------------------------------------------------------------------------------------------- recorded times


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zbv", "looped_bfs"])
def test_recorded_costs_are_those_of_the_recorded_step(name: str, tmp_path: Path) -> None:
    """B is I + W, and each half of a B that was not split half of it. The clock of a rank can be late."""
    schedule = build(name, 3, 7)
    costs = Costs(F=1.1, B=2.2, I=1.3, W=0.9, p2p=0.25, weights=[1 + 0.1 * s for s in range(schedule.num_stages)])
    timeline = simulate(schedule, costs)
    late = [
        [span._replace(start=span.start + rank, end=span.end + rank) for span in spans]
        for rank, spans in enumerate(timeline.spans)
    ]
    write_trace(tmp_path, 4, Timeline(late))
    recorded, found = recorded_costs(tmp_path)
    assert (recorded.pp, recorded.chunks, recorded.placement) == (3, schedule.chunks, schedule.placement)
    assert found.p2p == pytest.approx(0.25)
    for stage in range(schedule.num_stages):
        for kind in "FBIW":
            halved = kind in "IW" and name in ("1f1b", "looped_bfs")
            expected = costs.of(Action("B", stage)) / 2 if halved else costs.of(Action(kind, stage))
            assert found.of(Action(kind, stage)) == pytest.approx(expected)


def test_recorded_pairs_add_no_times_of_their_own(tmp_path: Path) -> None:
    schedule, costs = build("dualpipev", 3, 8), Costs(F=1.1, B=2.2, I=1.3, W=0.9, overlapped=0.5)
    write_trace(tmp_path, 4, simulate(schedule, costs))
    _, found = recorded_costs(tmp_path)
    for kind, stage in itertools.product("FBIW", range(6)):
        action = Action(kind, stage)
        assert found.of(action) in (pytest.approx(costs.of(action)), pytest.approx(costs.of(Action("B", stage)) / 2))


def test_incomplete_trace_is_rejected(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 2, 4))
    write_trace(tmp_path, 2, Timeline([timeline.spans[0][:-1], timeline.spans[1]]))
    with pytest.raises(UserError, match=r"the schedule of step 2 in .* cannot run: pp rank 0 lacks 0B3"):
        recorded_costs(tmp_path)


def test_message_time_of_one_rank_is_zero() -> None:
    assert message_time(build("afab", 1, 2), simulate(build("afab", 1, 2))) == 0.0


# ------------------------------------------------------------------------------------------------ config and draw


def auto_config(tmp_path: Path, **changes: Any) -> Any:
    keys: dict[str, Any] = {"pp_engine": "auto", "pp_size": 2, "training__gradient_accumulation_steps": 6, **changes}
    if "pp_costs" in keys:
        keys["pp_costs"] = str(tmp_path)
        write_trace(tmp_path, 3, simulate(build("1f1b", 2, 4), Costs(weights=[1.0, 3.0])))
    return make_config(**{key if "__" in key else f"distributed__{key}": value for key, value in keys.items()})


def test_plan_of_a_config_is_searched(tmp_path: Path) -> None:
    plan = plan_pipeline(auto_config(tmp_path), tiny_llama(num_hidden_layers=6))
    assert plan.schedule.chunks == 2
    assert "schedule: " in str(plan)
    assert "expected, with times estimated by FLOPs: step time 1" in str(plan)
    assert "(limit 2)" in str(plan)
    assert max(map(peak_activations, plan.schedule.programs)) <= 4
    one = plan_pipeline(auto_config(tmp_path, pp_memory=1.5), tiny_llama(num_hidden_layers=6))
    assert max(map(peak_activations, one.schedule.programs)) <= 3
    assert plan_pipeline(auto_config(tmp_path), tiny_llama(num_hidden_layers=3)).schedule.chunks == 1
    assert plan_pipeline(auto_config(tmp_path, pp_layout="Ett|tL"), tiny_llama()).schedule.chunks == 1
    three = auto_config(tmp_path, pp_layout="Ett|t||t|tt|L")
    assert plan_pipeline(three, tiny_llama(num_hidden_layers=6)).schedule.chunks == 3


def test_plan_uses_the_times_of_a_recorded_run(tmp_path: Path) -> None:
    plan = plan_pipeline(auto_config(tmp_path, pp_costs=True), tiny_llama(num_hidden_layers=6))
    assert (plan.schedule.chunks, plan.schedule.microbatches) == (1, 6)
    assert f"measured in '{tmp_path}': step time" in str(plan)
    assert " s, bubble" in str(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_engine": "1f1b", "pp_memory": 2}, "pp_memory=2.0 is for pp_engine='auto', not '1f1b'; remove it"),
        ({"pp_engine": "1f1b", "pp_costs": True}, "is for pp_engine='auto', not '1f1b'; remove it"),
        ({"pp_group_size": 2}, "pp_group_size=2 cannot be used with pp_engine='auto'; remove it"),
        ({"pp_costs": True, "pp_size": 3}, "has pp_size=2, but the config has 3"),
        ({"pp_costs": True, "pp_chunks": 2}, "has pp_chunks=1, but the config has 2"),
        ({"pp_layout": "Ett|t|tttL"}, "has 3 stages, but the schedule has 2 (pp ranks times chunks)"),
        ({"pp_size": 7}, "needs at least 7 layers, one per stage, but num_hidden_layers=6"),
    ],
)
def test_mismatch_is_rejected_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        plan_pipeline(auto_config(tmp_path, **changes), tiny_llama(num_hidden_layers=6))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_draw_searches_with_and_without_recorded_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw.main(["--schedule", "auto", "--memory", "2", "--chunks", "1", "--out", str(tmp_path / "found.csv")])
    programs = [line.split(",") for line in (tmp_path / "found.csv").read_text().splitlines()]
    assert max(peak_activations([parse_action(cell) for cell in program]) for program in programs) <= 2
    write_trace(tmp_path, 3, simulate(build("zbv", 2, 4), Costs(F=0.01, I=0.01, W=0.01)))
    draw.main(["--schedule", "auto", "--costs", str(tmp_path), "--pp", "2", "--memory", "4"])
    assert "V placement, memory limit 4, pp=2, microbatches=8, chunks=2" in capsys.readouterr().out
    for words, message in (
        (["--memory", "2"], "--memory has no effect with --schedule 1f1b; remove it"),
        (["--all", "--costs", "x"], "--costs has no effect with --all; remove it"),
        (["--schedule", "auto", "--group_size", "4"], "--group_size has no effect with --schedule auto; remove it"),
        (
            ["--schedule", "auto", "--costs", str(tmp_path)],
            "has pp=2 and 2 chunk(s) per pp rank; use --pp 2 --chunks 2",
        ),
        (["--step", "2"], "--step has no effect with --schedule 1f1b; remove it"),
    ):
        with pytest.raises(SystemExit) as error:
            draw.main(words)
        assert message in str(error.value)


def test_search_knows_every_hand_made_schedule() -> None:
    assert {name for shape in shapes(None) for name in hand_made(2, 4, shape)} == set(SCHEDULES)
