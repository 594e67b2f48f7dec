"""The search for a schedule: results fit and run, nothing hand-made is faster, and bubbles are those of the paper."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.oracle import make_config, tiny_llama
from picotron.console import UserError
from picotron.drawing.__main__ import main
from picotron.explain import estimate
from picotron.explain.hardware import HARDWARE
from picotron.pipeline_parallel.auto import deferred_fraction
from picotron.pipeline_parallel.plan import plan_pipeline, settings_of
from picotron.pipeline_parallel.stages import Stage
from picotron.schedules import search
from picotron.schedules.actions import Schedule, parse_action
from picotron.schedules.schedules import SCHEDULES, build
from picotron.schedules.search import KNOBS, ROUNDING, Greedy, Shape, fastest_schedule, fits, hand_made, shapes
from picotron.schedules.simulate import Costs, memory_curves, peak_activations, simulate
from picotron.schedules.trace import settings_line, trace_path
from picotron.sweep.planner import Planner
from tests.drawing.test_draw import write_trace
from tests.schedules.test_schedules import assert_runs
from tests.support.zero_bubble import CASES, Case

LOOP: Shape = (1, "loop")
FEW_MOVES = mock.patch.object(search, "BUDGET", 40_000)  # for what holds after any number of moves


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.p == 8 and case.m < 64 else pytest.mark.slow) for case in CASES],
    ids=lambda case: f"{case.model}, m {case.m}",
)
def test_search_reaches_the_bubbles_of_the_zero_bubble_paper(case: Case) -> None:
    assert case.searched_rate(case.p) <= case.of_zb_1p + 5.1e-5
    assert case.searched_rate(2 * case.p) <= case.of_zb_2p + (4e-4 if case.p < 32 else 3e-3)


times = st.floats(0.25, 4)


@settings(deadline=None, max_examples=6)
@given(
    pp=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    memory=st.floats(1, 8),
    shape=st.sampled_from([(1, "loop"), (2, "loop"), (2, "V"), (3, "loop")]),
    times=st.tuples(times, times, times),
    p2p=st.sampled_from([0.0, 0.1, 1.0]),
    data=st.data(),
)
def test_schedule_fits_runs_and_nothing_hand_made_is_faster(
    pp: int, micro_batches: int, memory: float, shape: Shape, times: tuple[float, ...], p2p: float, data: st.DataObject
) -> None:
    F, I, W = times  # noqa: E741
    weights = data.draw(st.lists(st.floats(0.25, 2), min_size=pp * shape[0], max_size=pp * shape[0]))
    costs = Costs(F=F, B=I + W, I=I, W=W, p2p=p2p, weights=weights)
    found = fastest_schedule(pp, micro_batches, memory, {shape: costs})
    assert_runs(found.schedule)
    assert found.score == simulate(found.schedule, costs).step_time
    assert max(map(peak_activations, found.schedule.programs)) <= memory * shape[0] * (1 + ROUNDING)
    for schedule in hand_made(pp, micro_batches, shape).values():
        if max(map(peak_activations, schedule.programs)) <= memory * shape[0]:
            assert found.score <= simulate(schedule, costs).step_time


@settings(deadline=None, max_examples=12)
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
    assert peak(found.schedule) <= memory * (1 + 1e-8)
    for schedule in hand_made(pp, micro_batches, shape).values():
        if peak(schedule) <= memory * (1 - 1e-8):
            assert found.score <= simulate(schedule, costs).step_time
    if max(sizes) > 0 and memory >= shape[0] * max(sizes):
        limit = memory / max(sizes) / shape[0]
        in_micro_batches = fastest_schedule(pp, micro_batches, limit, {shape: costs}, deferred)
        assert found.score <= in_micro_batches.score * (1 + 1e-8)


def stages_of(pp: int, shape: Shape) -> list[list[int]]:
    """Return the stages of each rank."""
    empty = Schedule([[]] * pp, 1, *shape)
    return [empty.stages_of(rank) for rank in range(pp)]


@FEW_MOVES
@pytest.mark.parametrize("shape", [(1, "loop"), (2, "loop"), (2, "V")])
@pytest.mark.parametrize("limit", [1, 1.5, 3, 8])
def test_sizes_of_equal_stages_are_a_change_of_unit(shape: Shape, limit: float) -> None:
    costs = {shape: Costs(weights=[1 + s % 3 / 4 for s in range(4 * shape[0])], p2p=0.1)}
    in_bytes = fastest_schedule(4, 8, limit * 2**30 * shape[0], costs, 0.5, sizes=[2**30] * (4 * shape[0]))
    assert in_bytes.schedule == fastest_schedule(4, 8, limit, costs, 0.5).schedule


def test_small_stages_hold_more_micro_batches() -> None:
    """The last rank holds two micro-batches at most, and the first one more, as 1F1B needs."""
    found = fastest_schedule(4, 8, 8, {LOOP: Costs()}, sizes=[2, 2, 2, 4])
    assert found.score < fastest_schedule(4, 8, 2, {LOOP: Costs()}).score
    assert peak_activations(found.schedule.programs[0]) > 2 >= peak_activations(found.schedule.programs[3])


@FEW_MOVES
def test_shapes_that_need_too_much_memory_are_skipped() -> None:
    """In a loop, rank 1 has both large stages; in a V, each rank has one."""
    options = {shape: Costs() for shape in shapes(2)}
    assert fastest_schedule(2, 4, 4, options, sizes=[1, 3, 1, 3]).schedule.placement == "V"
    assert fastest_schedule(2, 4, 4, options, sizes=[1, 1, 3, 3]).schedule.placement == "loop"
    with pytest.raises(UserError, match=r"^a memory limit of 3\.9 is too low: one micro-batch takes 4 on a pp rank$"):
        fastest_schedule(2, 4, 3.9, options, sizes=[1, 3, 1, 3])


@pytest.mark.parametrize("shape", [(1, "loop"), (2, "loop"), (2, "V")])
@pytest.mark.parametrize("memory", [1, 2, 4, 12])
def test_runs_that_are_skipped_would_repeat_an_earlier_one(shape: Shape, memory: int) -> None:
    costs = Costs(weights=[1 + s % 3 / 10 for s in range(4 * shape[0])], W=0.8, p2p=0.1)

    def greedy() -> Greedy:
        return Greedy(Schedule([[]] * 4, 8, *shape), memory, costs, 1.0)

    shared = greedy()
    found = [shared.run(knobs, math.inf) for knobs in KNOBS]
    for schedule in (greedy().run(knobs, math.inf) for knobs in KNOBS):
        assert schedule in found
    assert (None in found) == (memory == 12 or (memory == 1 and shape == LOOP))


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
    words = [sys.executable, "-m", "picotron.drawing", "search", "--p2p", "0.3", "--memory", "3"]
    printed = [
        subprocess.run(words, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] != ""
    assert printed[0].startswith("search, ")


# ------------------------------------------------------------------------------------------------ config and draw


def auto_config(tmp_path: Path, **changes: Any) -> Any:
    keys: dict[str, Any] = {"pp_engine": "auto", "pp_size": 2, "training__gradient_accumulation_steps": 6, **changes}
    if "pp_recording" in keys:
        keys["pp_recording"] = str(tmp_path)
        record(tmp_path)
    return make_config(**{key if "__" in key else f"distributed__{key}": value for key, value in keys.items()})


def record(folder: Path) -> None:
    """Write the trace of a step of 1F1B on two ranks with six layers."""
    config, model_config = make_config(distributed__pp_size=2), tiny_llama(num_hidden_layers=6)
    write_trace(folder, 3, simulate(build("1f1b", 2, 4), Costs(weights=[1.0, 3.0])))
    first_line = settings_line(settings_of(config, model_config, plan_pipeline(config, model_config).stages))
    trace = trace_path(folder, 3)
    trace.write_text(f"{first_line}\n{trace.read_text()}")


@FEW_MOVES
def test_plan_of_a_config_is_searched(tmp_path: Path) -> None:
    plan = plan_pipeline(auto_config(tmp_path), tiny_llama(num_hidden_layers=6))
    assert plan.schedule.chunks == 2
    assert "schedule: " in str(plan)
    assert "expected, with times estimated by FLOPs: step time 1" in str(plan)
    assert "(limit 2)" in str(plan)
    assert max(map(peak_activations, plan.schedule.programs)) <= 4
    one = plan_pipeline(auto_config(tmp_path, pp_max_activations=1.5), tiny_llama(num_hidden_layers=6))
    assert max(map(peak_activations, one.schedule.programs)) <= 3
    assert plan_pipeline(auto_config(tmp_path), tiny_llama(num_hidden_layers=3)).schedule.chunks == 1
    assert plan_pipeline(auto_config(tmp_path, pp_layout="Ett|tL"), tiny_llama()).schedule.chunks == 1
    three = auto_config(tmp_path, pp_layout="Ett|t||t|tt|L")
    assert plan_pipeline(three, tiny_llama(num_hidden_layers=6)).schedule.chunks == 3


def test_plan_uses_the_times_of_a_recorded_run(tmp_path: Path) -> None:
    plan = plan_pipeline(auto_config(tmp_path, pp_recording=True), tiny_llama(num_hidden_layers=6))
    assert (plan.schedule.chunks, plan.schedule.micro_batches) == (1, 6)
    assert f"measured in '{tmp_path}': step time" in str(plan)
    assert " s (the best possible), bubble" in str(plan)


@pytest.mark.parametrize(
    ("changes", "sizes", "difference"),
    [
        ({"training__seq_length": 32}, {}, "training.seq_length=16, not 32"),
        ({"training__micro_batch_size": 1}, {}, "training.micro_batch_size=2, not 1"),
        ({"training__activation_checkpointing": "full"}, {}, "training.activation_checkpointing='none', not 'full'"),
        ({"training__compile": True}, {}, "training.compile=False, not True"),
        ({"tp_size": 2}, {}, "distributed.tp_size=1, not 2"),
        ({"cp_size": 2}, {}, "distributed.cp_size=1, not 2"),
        ({"tp_size": 2, "sequence_parallel": True}, {}, "distributed.sequence_parallel=False, not True"),
        ({"dp_size": 2, "dp_engine": "zero3"}, {}, "number of ranks that shard the weights=1, not 2"),
        ({"model__dtype": "bfloat16"}, {}, "model.dtype='float64', not 'bfloat16'"),
        ({"use_cpu": False}, {}, "distributed.use_cpu=True, not False"),
        ({"pp_layout": "Ett|ttttL"}, {}, "stages='Ettt|tttL', not 'Ett|ttttL'"),
        ({}, {"num_hidden_layers": 8}, "stages='Ettt|tttL', not 'Etttt|ttttL'"),
        ({}, {"hidden_size": 64}, "hidden_size of the model=32, not 64"),
    ],
)
def test_a_recording_of_other_settings_is_rejected(
    changes: dict[str, Any], sizes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    config = auto_config(tmp_path, pp_recording=True, **changes)
    with pytest.raises(UserError) as error:
        plan_pipeline(config, tiny_llama(**{"num_hidden_layers": 6} | sizes))
    assert f"the run in pp_recording='{tmp_path}' was recorded with " in str(error.value)
    assert difference in str(error.value)
    assert str(error.value).endswith("; record a run with the settings of this config, or remove pp_recording")


def test_a_recording_serves_other_schedules_and_batches(tmp_path: Path) -> None:
    others = {
        "pp_max_activations": 3,
        "dp_size": 4,
        "training__gradient_accumulation_steps": 9,
        "training__learning_rate": 1e-4,
    }
    config = auto_config(tmp_path, pp_recording=True, **others)
    assert plan_pipeline(config, tiny_llama(num_hidden_layers=6)).schedule.micro_batches == 9


def test_a_sweep_leaves_out_only_the_configs_that_a_recording_does_not_fit(tmp_path: Path) -> None:
    planner = Planner(tiny_llama(num_hidden_layers=6), HARDWARE["H100"])
    configs = [auto_config(tmp_path, pp_recording=True, training__micro_batch_size=size) for size in (1, 2)]
    assert [planner.plan(config) is None for config in configs] == [True, False]


def test_a_recording_without_settings_is_rejected(tmp_path: Path) -> None:
    config = auto_config(tmp_path, pp_recording=True)
    write_trace(tmp_path, 4, simulate(build("1f1b", 2, 4)))
    with pytest.raises(UserError, match=r"trace_step_00000004.jsonl does not say with which settings"):
        plan_pipeline(config, tiny_llama(num_hidden_layers=6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_recording": True, "pp_size": 3}, "has pp_size=2, but the config has 3"),
        ({"pp_recording": True, "pp_chunks": 2}, "has pp_chunks=1, but the config has 2"),
        ({"pp_layout": "Ett|t|tttL"}, "has 3 stages, but the schedule has 2 (pp ranks times chunks)"),
        ({"pp_size": 7}, "needs at least 7 layers, one per stage, but num_hidden_layers=6"),
    ],
)
def test_mismatch_is_rejected_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        plan_pipeline(auto_config(tmp_path, **changes), tiny_llama(num_hidden_layers=6))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_deferred_fraction_is_that_of_the_estimated_memory(tp: int, sequence_parallel: bool) -> None:
    keys = {"distributed__tp_size": tp, "distributed__sequence_parallel": sequence_parallel}
    config, model = make_config(training__activation_checkpointing="full", **keys), tiny_llama()
    s = estimate.sizes(config, model)
    deferred = estimate.deferred_bytes(s, Stage(range(1), False, False))
    assert deferred_fraction(config, model) == deferred / estimate.layer_saves(config, s) > 1
    assert deferred_fraction(make_config(**keys), model) == 1


@pytest.mark.parametrize("family", ["llama", "olmo2", "qwen3"])
def test_deferred_fraction_of_selective_recomputation_is_nearly_that_of_the_estimated_memory(family: str) -> None:
    """It leaves out the numbers in float32: the log-sum-exp of scores, and of norms after products 1 / rms."""
    keys = {"training__activation_checkpointing": "selective", "distributed__use_cpu": False}
    config, model = make_config(model__dtype="bfloat16", **keys), tiny_llama(family, hidden_size=256, head_dim=64)
    s = estimate.sizes(config, model)
    kept = estimate.layer_saves(config, s) / estimate.deferred_bytes(s, Stage(range(1), False, False))
    assert 1 / deferred_fraction(config, model) == pytest.approx(kept, rel=0.02)


@FEW_MOVES
def test_memory_of_a_searched_schedule_with_recomputation_is_near_that_of_1f1b() -> None:
    """The sizes of Llama 70B. If the search counted nothing between I and W, its schedule would hold 18 GiB."""
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    model = tiny_llama(**sizes, num_attention_heads=64, num_key_value_heads=8)
    keys: dict[str, Any] = {
        "distributed__tp_size": 8,
        "distributed__pp_size": 8,
        "training__activation_checkpointing": "full",
        "training__gradient_accumulation_steps": 32,
        "training__micro_batch_size": 1,
        "training__seq_length": 4096,
        "model__dtype": "bfloat16",
    }
    peaks = []
    for engine in ("1f1b", "auto"):
        config = make_config(distributed__pp_engine=engine, **keys)
        memories = estimate.rank_memory(config, model, plan_pipeline(config, model))
        peaks.append(max(memory.activations for memory in memories))
    assert peaks[1] <= 1.2 * peaks[0] < 10 * 2**30


def test_drawing_searches_with_and_without_recorded_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["search", "--memory", "2", "--chunks", "1", "--out", str(tmp_path / "found.csv")])
    programs = [line.split(",") for line in (tmp_path / "found.csv").read_text().splitlines()]
    assert max(peak_activations([parse_action(cell) for cell in program]) for program in programs) <= 2
    write_trace(tmp_path, 3, simulate(build("zbv", 2, 4), Costs(F=0.01, I=0.01, W=0.01)))
    main(["search_measured", str(tmp_path), "--memory", "4"])
    assert "V placement, memory limit 4, pp=2, micro_batches=8, chunks=2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="a memory limit of 0 micro-batches is too low"):
        main(["search", "--memory", "0"])


@FEW_MOVES
def test_drawing_searches_with_sizes_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--activations", "3.1", "2.9", "2.9", "4.0"]
    for pp, memory in ((4, "12"), (4, "4"), (2, "7"), (2, "20"), (1, "12.9")):
        main(["search", *sizes, "--pp", str(pp), "--memory", memory])
        out = capsys.readouterr().out
        assert f"memory limit {memory}, pp={pp}, micro_batches=8, chunks={4 // pp}" in out
        assert max(map(float, out.split("peak activations by pp rank ")[1].split())) <= float(memory)
    write_trace(tmp_path, 3, simulate(build("zbv", 2, 4), Costs(F=0.01, I=0.01, W=0.01)))
    main(["search_measured", str(tmp_path), *sizes, "--memory", "14"])
    assert "V placement, memory limit 14, pp=2, micro_batches=8, chunks=2" in capsys.readouterr().out
    for words, message in (
        (
            ["search", *sizes, "--memory", "3.5"],
            "a memory limit of 3.5 is too low: one micro-batch takes 4 on a pp rank",
        ),
        (
            ["search", *sizes, "--memory", "9", "--pp", "3"],
            "--activations has 4 sizes, but 3 pp ranks need a multiple of 3",
        ),
        (
            ["search_measured", str(tmp_path), *sizes[:-1], "--memory", "9"],
            "--activations has 3 sizes, but there are 4 stages",
        ),
    ):
        with pytest.raises(SystemExit) as error:
            main(words)
        assert str(error.value) == f"error: {message}"


def test_search_knows_every_hand_made_schedule() -> None:
    found = {name: schedule for shape in shapes(None) for name, schedule in hand_made(2, 4, shape).items()}
    assert {name.partition(" in groups of ")[0] for name in found} == set(SCHEDULES)


def test_search_tries_other_group_sizes() -> None:
    """Groups of at least p micro-batches, each different from the default, which is as long as possible for m < p."""
    found = hand_made(4, 12, (2, "loop"))
    assert [name for name in found if name.startswith("zb_h1")] == [
        "zb_h1",
        *(f"zb_h1 in groups of {g}" for g in (12, 6)),
    ]
    assert found["zb_h1 in groups of 6"] == build("zb_h1", 4, 12, 2, group_size=6)
    assert not any("groups" in name for name in [*hand_made(4, 12, LOOP), *hand_made(4, 3, (2, "loop"))])
    slow = Costs(p2p=0.2)
    assert simulate(found["zb_h1 in groups of 6"], slow).step_time < simulate(found["zb_h1"], slow).step_time


@pytest.mark.parametrize("deferred", [1.5, pytest.param(5.6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [LOOP, pytest.param((2, "loop"), marks=pytest.mark.slow), (2, "V")])
def test_full_backwards_where_w_keeps_more_than_a_forward(shape: Shape, deferred: float) -> None:
    """With room for one micro-batch, the backward of a single stage cannot be split."""
    costs = {shape: Costs()}
    for memory in (1, 1.4, 2, 4, 7, 30):
        found = fastest_schedule(3, 6, memory, costs, deferred)
        assert_runs(found.schedule)
        assert fits(found.schedule, memory, deferred)
        assert found.schedule.splits_backward or memory < 7
        assert not found.schedule.splits_backward or memory > 1 or shape != LOOP


def test_full_backwards_where_they_are_faster() -> None:
    """Some backwards are full, because a full one is shorter than its halves together."""
    found = fastest_schedule(2, 4, 2, {LOOP: Costs(B=1.5, weights=[1, 1.2], p2p=0.3)})
    assert found.score < fastest_schedule(2, 4, 2, {LOOP: Costs(B=2, weights=[1, 1.2], p2p=0.3)}).score
    assert any(part.kind == "B" for program in found.schedule.programs for action in program for part in action.parts)


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
