"""The simulator: idle time and activations match the papers' formulas; costs and messages match results by hand."""

import itertools

import pytest

from workbench.schedules.actions import parse_action
from workbench.schedules.schedules import SCHEDULES, build, forward_only
from workbench.schedules.simulate import (
    Costs,
    Timeline,
    peak_activations,
    simulate,
)

GRID = list(itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 7, 8, 16, 24)))  # pp, micro-batches
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (1.0, 1.0, 0.5)]  # F, I, W of a micro-batch in all stages of a rank


def formulas(name: str, p: int, m: int, v: int, F: float, I: float, W: float) -> tuple[float | None, list[int] | None]:  # noqa: E741
    """Return the idle time of a rank and the most activations of each, by the formulas of the docstrings, where they
    hold.
    """
    equal, idle, even = F == I == W, (p - 1) * (F + I + W) / v, m % p == 0
    match name:
        case "afab" | "looped_bfs":
            return idle if v == 1 or m >= p else None, [v * m] * p
        case "1f1b":
            return idle, [min(p - rank, m) for rank in range(p)]
        case "interleaved_1f1b":
            peaks = [min((v - 1) * p + 2 * (p - rank) - 1, v * m) for rank in range(p)]
            return idle if m >= p else None, peaks if even else None
        case "zb_h1":
            return (p - 1) * (F + I - W) / v if even else None, [min(v * p, v * m)] * p if even else None
        case "zbv":
            return ((p - 1) * F / 2 if equal else None, [2 * p] * p) if m >= 2 * p - 1 else (None, None)
        case "dualpipev":
            idle = (p - 1) * (F + 2 * (I + W) - 3 * W) / 2
            return (idle if F == I else None, [2 * p + 1] * p) if m >= 2 * p else (None, None)
    idle = 0.0 if p == 1 else (4 * p - 5) * F / 2 + F * (p % 3 == 0 and m > 1)  # V-Min
    return idle if equal else None, None


def timeline_of(name: str, pp: int, micro_batches: int, chunks: int | None = None, **costs: float) -> Timeline:
    """Simulate a schedule. By default, a forward through all stages of a rank takes 1."""
    schedule = build(name, pp, micro_batches, chunks)
    return simulate(schedule, Costs(**costs, weights=[1 / schedule.chunks] * schedule.num_stages))  # type: ignore


@pytest.mark.parametrize(("F", "I", "W"), TIMES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_and_activations_match_the_formulas(name: str, F: float, I: float, W: float) -> None:  # noqa: E741
    recipe = SCHEDULES[name]
    for (pp, m), v in itertools.product(GRID, (1, 2, 3) if recipe.any_chunks else (recipe.chunks,)):
        timeline = timeline_of(name, pp, m, v, F=F, B=I + W, I=I, W=W)
        peaks = [peak_activations(program) for program in build(name, pp, m, v).programs]
        idle, expected = formulas(name, pp, m, v, F, I, W)
        if idle is not None:
            assert timeline.idle == pytest.approx([idle] * pp)
            assert timeline.bubble == pytest.approx(idle / (m * (F + I + W) + idle))
        assert expected in (None, peaks)
        most = {"zbv": 2 * pp, "dualpipev": 2 * pp + 1, "v_min": 2 * ((pp + 4) // 3)}.get(name, v * m)
        assert max(peaks) <= min(most, v * m)
        if m % pp == 0:
            assert max(simulate(forward_only(pp, m, v)).idle) == pp - 1


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("chunks", [2, 3])
def test_default_group_is_the_smallest_of_the_fastest(name: str, chunks: int) -> None:
    for pp, m in itertools.product((1, 3, 4), range(1, 12)):
        sizes = range(pp, max(pp, m) + 1)
        times = {g: simulate(build(name, pp, m, chunks, g)).step_time for g in sizes}
        fastest = min(sizes, key=times.__getitem__)
        assert build(name, pp, m, chunks).programs == build(name, pp, m, chunks, fastest).programs


def test_zbv_ranks_never_idle_between_their_first_and_last_action() -> None:
    for pp, m in GRID:
        if m >= 2 * pp - 1:
            for rank, spans in enumerate(timeline_of("zbv", pp, m).spans):
                assert spans[0].start == pytest.approx(rank / 2)
                assert spans[-1].end - spans[0].start == pytest.approx(3 * m)  # the computing time of a rank


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
