"""The pipeline schedules of the literature, each as the program of one rank. No torch, messages or times here.

Everything else follows from the programs of all ranks: `checker` proves that they finish and adds the messages,
`simulate` computes when each action runs, and `workbench.drawing` draws them.

In the docstrings, p is the number of ranks, m the number of micro-batches and v the number of chunks, the stages of one
rank. F, B, I and W are the times that a rank takes for these actions of one micro-batch, in all its stages together.

Idle: time of a step minus computing time of one rank, if all ranks have the same work and messages take no time.
Activations: the most that a rank holds at a time, in units of one micro-batch in one stage, see `simulate`.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from picotron.console import UserError
from workbench.schedules.actions import Action, Placement, Program, Schedule, rank_of

# One line for each phase of a schedule.
# fmt: off


def afab(rank: int, pp: int, micro_batches: int) -> Program:
    """All forward, all backward: GPipe (Huang et al. 2018, arXiv:1811.06965).

    Idle: (p - 1) (F + B), which is (p - 1) / (m + p - 1) of the step. Activations: m.
    """
    program = Program(micro_batches)
    for _ in range(micro_batches): program.forward(rank)
    for _ in range(micro_batches): program.backward(rank)
    return program


def one_f_one_b(rank: int, pp: int, micro_batches: int) -> Program:
    """1F1B, one forward, one backward: PipeDream-Flush (Narayanan et al. 2020, arXiv:2006.09503).

    Idle: that of AFAB. Activations: p - rank, at most m.
    """
    program = Program(micro_batches)
    for _ in range(pp - rank - 1): program.forward(rank)
    for _ in range(micro_batches): program.forward(rank); program.backward(rank)
    return program


def looped_bfs(rank: int, pp: int, micro_batches: int, chunks: int) -> Program:
    """Looped breadth-first: all micro-batches run through a rank's first stage, then all through its next one
    (Lamy-Poirier 2022, arXiv:2211.05953). The gradients of later chunks are complete early, which leaves time to reduce
    them.

    Idle: (p - 1) (F + B) / v, which is (p - 1) / (v m) of the rank's work, if m >= p. Activations: v m.
    """
    program, stages = Program(micro_batches), range(rank, pp * chunks, pp)
    for stage in stages:
        for _ in range(micro_batches):
            program.forward(stage)
    for stage in reversed(stages):
        for _ in range(micro_batches):
            program.backward(stage)
    return program


def smallest_group(pp: int, micro_batches: int, last: int) -> int:
    """Return the smallest group size of an interleaved schedule that makes no group shorter than `last` micro-batches.

    Only a short last group prolongs the step: in interleaved 1F1B one of fewer than p micro-batches; with split
    backwards one of fewer than p / 2, because W fills gaps. (The tests compare all group sizes by simulation.)
    """
    sizes = range(pp, micro_batches)
    return next((g for g in sizes if micro_batches % g == 0 or micro_batches % g >= last), max(pp, micro_batches))


def interleaved_order(
    rank: int, pp: int, micro_batches: int, chunks: int, group_size: int | None, warmup_per_rank: int
) -> list[int]:
    """Return the actions of a rank in which groups of micro-batches take turns on the chunks, as signed chunk numbers
    from 1: 2 is a forward of the second chunk, -2 a backward.

    A group runs through the first chunk, then through the next one, ..., then the next group. Backwards run in the same
    order, with the chunks counted from the last one. After the warm-up, forwards and backwards alternate.

    Args:
        group_size: g, the number of micro-batches that run through a chunk before the next chunk's turn; by default the
            smallest one that makes the step as short as possible.
        warmup_per_rank: difference in the length of the warm-up between two ranks, in forwards.

    Raises:
        UserError: the group size is too small.
    """
    if group_size is None:
        group_size = smallest_group(pp, micro_batches, last=-(-pp * warmup_per_rank // 2))
    if group_size < min(pp, micro_batches):
        raise UserError(
            f"a group of {group_size} micro-batches is smaller than pp_size={pp}: it would end before its first micro-batch "
            f"leaves the pipeline; use a group size of at least {min(pp, micro_batches)}"
        )
    groups = -(-micro_batches // group_size)  # `Program` drops actions beyond the last micro-batch
    forwards = [chunk + 1 for _ in range(groups) for chunk in range(chunks) for _ in range(group_size)]
    warmup = (chunks - 1) * group_size + warmup_per_rank * (pp - rank - 1)
    pairs = itertools.zip_longest(forwards[warmup:], (number - chunks - 1 for number in forwards), fillvalue=0)
    return forwards[:warmup] + [number for pair in pairs for number in pair if number]


def interleaved_1f1b(rank: int, pp: int, micro_batches: int, chunks: int, group_size: int | None = None) -> Program:
    """Interleaved 1F1B: with several smaller stages per rank, the pipeline fills and drains sooner (Narayanan et al.
    2021, arXiv:2104.04473). Llama 3 chooses the group size freely (Grattafiori et al. 2024, arXiv:2407.21783).

    Idle: (p - 1) (F + B) / v, which is (p - 1) / (v m) of the rank's work, for the default group size and m >= p.
    Activations: (v - 1) g + 2 (p - rank) - 1, at most v m.

    Args:
        group_size: see `interleaved_order`, which can raise UserError.
    """
    program = Program(micro_batches)
    for number in interleaved_order(rank, pp, micro_batches, chunks, group_size, warmup_per_rank=2):
        append = program.forward if number > 0 else program.backward
        append(rank + pp * (abs(number) - 1))
    return program


def zb_h1(rank: int, pp: int, micro_batches: int, chunks: int, group_size: int | None = None) -> Program:
    """ZB-H1: 1F1B with split backwards. No other stage waits for W, so W is delayed and fills time at the end of the
    step in which 1F1B is idle (Qi et al. 2023, arXiv:2401.10241). With several chunks, the order is that of interleaved
    1F1B (torch's ScheduleInterleavedZeroBubble).

    Idle: (p - 1) (F + I - W) / v for m a multiple of p, or m >= p if v = 1. If F = I = W, it is a third of interleaved
    1F1B's for any m >= p. Activations: (v - 1) g + p, at most v m.

    Args:
        group_size: see `interleaved_order`, which can raise UserError.
    """
    program = Program(micro_batches)
    for number in interleaved_order(rank, pp, micro_batches, chunks, group_size, warmup_per_rank=1):
        stage = rank + pp * (abs(number) - 1)
        if number > 0: program.forward(stage)
        else: program.backward_input(stage); program.backward_weight(keep=rank)
    program.all_backward_weights()
    return program


def zbv(rank: int, pp: int, micro_batches: int) -> Program:
    """Zero bubble in a V: stages go down through the ranks and up again, so the first rank also has the last stage and
    starts its backwards early (ZB-V in Qi et al. 2023, arXiv:2401.10241; Qi et al. 2024, arXiv:2405.15362).

    Idle: (p - 1) F / 2, if F = I = W and m >= 2 p - 1. No rank idles between its first and its last action, but the
    last rank starts this much later than the first. Activations: 2 p, at most 2 m.
    """
    program, down, up = Program(micro_batches), rank, 2 * pp - 1 - rank
    for _ in range(2 * (pp - rank) - 1): program.forward(down)
    for _ in range(rank): program.forward(up); program.forward(down)
    for _ in range(pp - rank): program.forward(up); program.backward_input(up); program.backward_weight()
    for _ in range(max(micro_batches, 2 * pp - 1) - pp):  # the steady state
        for stage in (down, up): program.forward(stage); program.backward_input(stage); program.backward_weight()
    for _ in range(rank): program.backward_input(down); program.backward_input(up)
    for _ in range(pp - rank): program.backward_input(down); program.backward_weight()
    program.all_backward_weights()
    return program


def dualpipev(rank: int, pp: int, micro_batches: int) -> Program:
    """DualPipeV: a V in which forwards and backwards overlap, so that communication inside stages, such as that of
    mixture-of-experts layers, hides behind computation (DeepSeek-AI 2024, arXiv:2412.19437; as a V in their DualPipe
    repository, 2025).

    Idle: (p - 1) (X + B - 3 W) / 2, where X is the time of overlapped pairs (F + B if overlapping saves no time), if
    F = I >= W and m >= 2 p; ranks before the last one idle less if X < F + B. Activations: 2 p + 1, at most 2 m.
    """
    program, down, up = Program(micro_batches), rank, 2 * pp - 1 - rank
    for _ in range(2 * (pp - rank - 1)): program.forward(down)
    for _ in range(rank + 1): program.forward(down); program.forward(up)
    for _ in range(pp - rank - 1): program.backward_input(up); program.backward_weight(); program.forward(up)
    pairs = max(micro_batches, 2 * pp) - 2 * pp + rank + 1
    if rank == pp - 1:  # this forward runs alone, while the first gradient is still on its way
        program.forward(down); program.backward(up); program.overlapped(up, down)
        pairs -= 1
    for _ in range(pairs): program.overlapped(down, up); program.overlapped(up, down)
    for _ in range(pp - rank - 1): program.backward(up); program.overlapped(up, down)
    for i in range(2 * (rank + 1)):  # no forwards are left; in the second half W is delayed, to fill the gaps at the end
        (program.backward if i <= rank else program.backward_input)(down if i % 2 else up)
    for _ in range(pp - rank - 1): program.backward_weight(); program.backward_input(down)
    program.all_backward_weights()
    return program


def v_min(rank: int, pp: int, micro_batches: int) -> Program:
    """V-Min: a V in which a micro-batch never waits, so its activations are freed early (Qi et al. 2024,
    arXiv:2405.15362, who also reorder actions at both ends of the step). Each micro-batch repeats the pattern of the
    one before it, 6 units of time later: a rank's F, I and W in its two stages take one unit each. W fills free units.

    Idle: (4 p - 5) F / 2, if F = I = W and p > 1; F more if p is a multiple of 3 and m > 1. Activations: 2 (p + 4) / 3,
    with the quotient rounded down, at most 2 m.
    """
    program, down, up = Program(micro_batches), rank, 2 * pp - 1 - rank
    turn = 2 * pp + (0 if pp % 3 else 2)  # if p is a multiple of 3, forwards and backwards collide without a pause
    starts = {down: (program.forward, down), up: (program.forward, up)}
    starts |= {turn + down: (program.backward_input, up), turn + up: (program.backward_input, down)}
    for time in range(6 * micro_batches + 4 * pp):
        due = [action for start, action in starts.items() if time >= start and (time - start) % 6 == 0]
        for append, stage in due: append(stage)
        if not due: program.backward_weight()
    program.all_backward_weights()
    return program


# fmt: on


class Recipe(NamedTuple):
    """A schedule: the function that builds one rank's program, and the stages that it needs."""

    program: Callable[..., Program]
    chunks: int = 1  # per rank, by default
    any_chunks: bool = False  # whether other numbers of chunks work, too
    has_groups: bool = False  # whether micro-batches take turns on the chunks in groups, whose size can be chosen
    placement: Placement = "loop"


MAX_FORWARDS = 2**18  # per step, in all stages: so many take seconds to simulate

SCHEDULES = {
    "afab": Recipe(afab),
    "1f1b": Recipe(one_f_one_b),
    "looped_bfs": Recipe(looped_bfs, chunks=2, any_chunks=True),
    "interleaved_1f1b": Recipe(interleaved_1f1b, chunks=2, any_chunks=True, has_groups=True),
    "zb_h1": Recipe(zb_h1, any_chunks=True, has_groups=True),
    "zbv": Recipe(zbv, chunks=2, placement="V"),
    "dualpipev": Recipe(dualpipev, chunks=2, placement="V"),
    "v_min": Recipe(v_min, chunks=2, placement="V"),
}

LOOPS = ("afab", "1f1b")  # run by loops of their own, in which ranks wait for their messages, not by the executor


def build(name: str, pp: int, micro_batches: int, chunks: int | None = None, group_size: int | None = None) -> Schedule:
    """Build a schedule of SCHEDULES.

    Args:
        pp: number of ranks.
        micro_batches: number of micro-batches per step.
        chunks: number of stages per rank; by default that of SCHEDULES.
        group_size: only for schedules with groups, see `interleaved_order`.

    Raises:
        UserError: there is no such schedule, or it does not work with these numbers.
    """
    if name not in SCHEDULES:
        raise UserError(f"there is no hand-made schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    recipe = SCHEDULES[name]
    chunks = recipe.chunks if chunks is None else chunks
    _check_numbers(pp, micro_batches, chunks)
    if chunks != recipe.chunks and not recipe.any_chunks:
        flexible = _one_of(other for other in SCHEDULES if SCHEDULES[other].any_chunks)
        raise UserError(f"{name} has {recipe.chunks} chunk(s) per pp rank, not {chunks}; for {chunks}, use {flexible}")
    if group_size is not None and not recipe.has_groups:
        grouped = _one_of(other for other in SCHEDULES if SCHEDULES[other].has_groups)
        raise UserError(
            f"{name} has no groups of micro-batches, so remove the group size {group_size}, or use {grouped}"
        )
    options = {"chunks": chunks} if recipe.any_chunks else {}
    options |= {} if group_size is None else {"group_size": group_size}
    programs = [recipe.program(rank, pp, micro_batches, **options) for rank in range(pp)]
    return Schedule(programs, micro_batches, chunks, recipe.placement)


@functools.cache
def action_kinds(name: str) -> set[str]:
    """Return the kinds of a hand-made schedule's actions: F with B, with I and W, or with all three."""
    return {part.kind for program in build(name, 4, 16).programs for action in program for part in action.parts}


def _one_of(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def forward_only(pp: int, micro_batches: int, chunks: int = 1, placement: Placement = "loop") -> Schedule:
    """Build the schedule of an evaluation, for stages that are placed as in training. Forwards run in the order in
    which they could run if every stage had a separate rank.

    Idle: (p - 1) F / v in a loop, if m is a multiple of p.
    """
    _check_numbers(pp, micro_batches, chunks)
    earliest_first = sorted(
        (Action("F", stage, i) for stage in range(pp * chunks) for i in range(micro_batches)),
        key=lambda action: (action.stage + action.micro_batch, action.micro_batch),
    )
    programs = [[a for a in earliest_first if rank_of(a.stage, pp, placement) == rank] for rank in range(pp)]
    return Schedule(programs, micro_batches, chunks, placement, forward_only=True)


def _check_numbers(pp: int, micro_batches: int, chunks: int) -> None:
    if min(pp, micro_batches, chunks) < 1:
        raise UserError(f"pp={pp}, micro_batches={micro_batches} and chunks={chunks} must each be at least 1")
    if pp * micro_batches * chunks > MAX_FORWARDS:
        raise UserError(
            f"pp={pp} x micro_batches={micro_batches} x chunks={chunks} is {pp * micro_batches * chunks:,} forwards per step; "
            f"a schedule has at most {MAX_FORWARDS:,}"
        )
