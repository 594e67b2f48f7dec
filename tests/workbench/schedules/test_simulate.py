"""The simulator: idle time and activations match the papers' formulas; costs and messages match results by hand."""

import itertools

import pytest

from benchmarks.zero_bubble import CASES, Case
from workbench.schedules.actions import parse_action
from workbench.schedules.schedules import build, forward_only
from workbench.schedules.simulate import (
    Costs,
    Timeline,
    peak_activations,
    simulate,
)

GRID = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16, 24)))  # pp, micro-batches
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (2.0, 2.0, 0.5)]  # F, I, W of a micro-batch in all stages of a rank


def timeline_of(name: str, pp: int, micro_batches: int, chunks: int | None = None, **costs: float) -> Timeline:
    """Simulate a schedule. By default, a forward through all stages of a rank takes 1."""
    schedule = build(name, pp, micro_batches, chunks)
    return simulate(schedule, Costs(**costs, weights=[1 / schedule.chunks] * schedule.num_stages))  # type: ignore


def peaks(name: str, pp: int, micro_batches: int, chunks: int | None = None) -> list[int]:
    return [peak_activations(program) for program in build(name, pp, micro_batches, chunks).programs]


@pytest.mark.parametrize(("F", "I", "W"), TIMES)
@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_afab_and_1f1b_match_the_formulas(name: str, F: float, I: float, W: float) -> None:  # noqa: E741
    for pp, m in GRID:
        timeline = timeline_of(name, pp, m, F=F, B=I + W)
        assert timeline.idle == pytest.approx([(pp - 1) * (F + I + W)] * pp)
        assert timeline.bubble == pytest.approx((pp - 1) / (m + pp - 1))
        assert peaks(name, pp, m) == [m if name == "afab" else min(pp - rank, m) for rank in range(pp)]


@pytest.mark.parametrize(("F", "I", "W"), TIMES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_chunks_divide_the_idle_time(chunks: int, F: float, I: float, W: float) -> None:  # noqa: E741
    for pp, m in GRID:
        idle = (pp - 1) * (F + I + W) / chunks
        assert idle / (m * (F + I + W)) == pytest.approx((pp - 1) / (chunks * m))  # as a fraction of the computing time
        if m >= pp:
            assert timeline_of("interleaved_1f1b", pp, m, chunks, F=F, B=I + W).idle == pytest.approx([idle] * pp)
        if m % pp == 0:
            assert max(simulate(forward_only(pp, m, chunks)).idle) == pp - 1
        if m >= pp:
            assert timeline_of("looped_bfs", pp, m, chunks, F=F, B=I + W).idle == pytest.approx([idle] * pp)
        assert peaks("looped_bfs", pp, m, chunks) == [chunks * m] * pp
        if m % pp == 0:
            expected = [min((chunks - 1) * pp + 2 * (pp - rank) - 1, chunks * m) for rank in range(pp)]
            assert peaks("interleaved_1f1b", pp, m, chunks) == expected


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("chunks", [2, 3])
def test_default_group_is_the_smallest_of_the_fastest(name: str, chunks: int) -> None:
    for pp, m in itertools.product((1, 3, 4), range(1, 12)):
        sizes = range(pp, max(pp, m) + 1)
        times = {g: simulate(build(name, pp, m, chunks, g)).step_time for g in sizes}
        fastest = min(sizes, key=times.__getitem__)
        assert build(name, pp, m, chunks).programs == build(name, pp, m, chunks, fastest).programs


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}, m {case.m}")
def test_bubbles_are_those_of_the_zero_bubble_paper(case: Case) -> None:
    assert case.rate_of("1f1b") == pytest.approx(case.of_1f1b, abs=5.1e-5)
    assert case.rate_of("zb_h1") == pytest.approx(case.of_zb_h1, abs=5.1e-5)


def test_zbv_ranks_never_idle_between_their_first_and_last_action() -> None:
    for pp, m in GRID:
        if m >= 2 * pp - 1:
            timeline = timeline_of("zbv", pp, m)
            for rank, spans in enumerate(timeline.spans):
                assert spans[0].start == pytest.approx(rank / 2)
                assert spans[-1].end - spans[0].start == pytest.approx(3 * m)  # the computing time of a rank
            assert timeline.idle == pytest.approx([(pp - 1) / 2] * pp)
            assert peaks("zbv", pp, m) == [2 * pp if m > 1 or pp > 1 else 2] * pp
        assert max(peaks("zbv", pp, m)) <= min(2 * pp, 2 * m)


@pytest.mark.parametrize("overlapped", [1.0, 0.8, 0.7])
@pytest.mark.parametrize("W", [1.0, 0.8, 0.5])
def test_dualpipev_matches_the_formulas(W: float, overlapped: float) -> None:
    """The formulas are in the README of DeepSeek's DualPipe, with times of one of a rank's two stages."""
    F = I = 1.0  # noqa: E741
    B, X = I + W, overlapped * (F + I + W)
    for pp, m in GRID:
        if m >= 2 * pp:
            timeline = timeline_of("dualpipev", pp, m, F=F, B=B, I=I, W=W, overlapped=overlapped)
            assert timeline.idle[-1] == pytest.approx((pp - 1) * (X + B - 3 * W) / 2)
            assert max(timeline.idle) == pytest.approx(timeline.idle[-1])
            assert peaks("dualpipev", pp, m) == [2 * pp + 1] * pp
        assert max(peaks("dualpipev", pp, m)) <= min(2 * pp + 1, 2 * m)


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6, 7, 8, 9, 16])
def test_v_min_matches_the_formulas(pp: int) -> None:
    for m in (1, 2, 3, pp, 2 * pp + 1, 3 * pp):
        idle = 0.0 if pp == 1 else (4 * pp - 5) / 2 + (pp % 3 == 0 and m > 1)
        assert timeline_of("v_min", pp, m).idle == pytest.approx([idle] * pp)
        assert max(peaks("v_min", pp, m)) == min(2 * ((pp + 4) // 3), 2 * m)


def test_peak_counts_deferred_units_and_temporary_memory() -> None:
    def peak(text: str) -> int:
        program = [parse_action(action) for action in text.split()]
        return peak_activations(program, {0: 10}, deferred={0: 7}, temporary={("F", 0): 1, ("B", 0): 3, ("I", 0): 4})

    assert peak("0F0 0B0 0F1 0B1") == 10 + 3
    assert peak("0F0 0I0 0W0") == 10 + 4
    assert peak("0F0 0I0 0F1 0W0 0I1 0W1") == 7 + 10 + 1
    assert peak("0F0 0I0 0F1 0I1 0W0 0W1") == 7 + 10 + 4


# --------------------------------------------------------------------------------------------------------- costs


def test_nothing_is_sent_between_stages_of_a_rank() -> None:
    """Stages 1 and 2 of a V are both on rank 1."""
    timeline = simulate(forward_only(2, 1, chunks=2, placement="V"), Costs(p2p=0.5))
    assert [[span.start for span in spans] for spans in timeline.spans] == [[0.0, 4.0], [1.5, 2.5]]


def test_messages_queue_on_the_link_between_two_ranks() -> None:
    """A message occupies its link for `transfer`, and then takes `p2p`. Links of the two directions are separate."""
    timeline = simulate(build("afab", 2, 3), Costs(transfer=1.5, p2p=0.25))
    assert [span.start for span in timeline.spans[1][:3]] == [1 + 1.5 + 0.25, 1 + 3.0 + 0.25, 1 + 4.5 + 0.25]
    back = [span.end for span in timeline.spans[1][3:]]
    assert timeline.spans[0][3].start == back[0] + 1.75
    fast = Costs(transfer=0.9, p2p=0.1)  # links are free when the next message leaves: as one time of a message
    assert simulate(build("1f1b", 3, 5), fast) == simulate(build("1f1b", 3, 5), Costs(p2p=1.0))


@pytest.mark.parametrize("message", [0.0, 0.1, 2.0])
def test_ranks_of_the_loops_wait_for_their_messages(message: float) -> None:
    """Worked out by hand for 2 ranks, 2 micro-batches and messages of x. In AFAB, rank 1 computes forwards until 2 + x
    and 3 + 2x, and backwards until 5 + 2x and 7 + 3x, after each of which rank 0 gets a message and computes for 2. In
    1F1B, rank 1 computes until 4 + x, exchanges its gradient for the second forward, and computes until 7 + 2x.
    """
    costs = Costs(p2p=message, waits=True)
    assert simulate(build("afab", 2, 2), costs).step_time == pytest.approx(9 + 4 * message)
    assert simulate(build("1f1b", 2, 2), costs).step_time == pytest.approx(9 + 3 * message)


def test_costs_depend_on_kind_stage_overlap_and_measurement() -> None:
    costs = Costs(F=1, B=3, I=1.5, W=1.25, weights=[1, 10], overlapped=0.5, measured={(("W", 1),): 7.0})
    for text, expected in (
        ("0F0", 1), ("1F0", 10), ("0B3", 3), ("1I0", 15), ("0W0", 1.25), ("1W9", 7), ("(1F1;0B0)", 6.5),
    ):  # fmt: skip
        assert costs.of(parse_action(text)) == expected
