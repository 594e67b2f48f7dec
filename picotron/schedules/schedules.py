"""The pipeline schedules that papers propose, each as the program of one rank. No torch, no messages, no clock.

From the programs of all ranks follows everything else: `checker` proves that they finish and adds the messages,
`simulate` says how long they take, `draw` shows them.

In the docstrings, p is the number of ranks, m that of micro-batches, and v that of chunks, the stages that each rank
holds. F, B, I and W are how long a rank needs for these actions of one micro-batch, in all its stages together.

Idle: how much longer than the work of one rank a step takes, if all ranks have as much work and messages take no time.
Activations: the most that a rank holds, counted in those of one micro-batch in one stage, see `simulate`.
"""

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

from picotron.errors import UserError
from picotron.schedules.actions import Action, Placement, Program, Schedule, rank_of

# One line for each phase of a schedule.
# fmt: off


def afab(rank: int, pp: int, microbatches: int) -> Program:
    """All forward, all backward: GPipe (Huang et al. 2018, arXiv:1811.06965).

    Idle: (p - 1) (F + B), which is (p - 1) / (m + p - 1) of the step. Activations: m.
    """
    program = Program(microbatches)
    for _ in range(microbatches): program.forward(rank)
    for _ in range(microbatches): program.backward(rank)
    return program


def one_f_one_b(rank: int, pp: int, microbatches: int) -> Program:
    """1F1B, one forward, one backward: PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473).

    Idle: as AFAB. Activations: p - rank, at most m.
    """
    program = Program(microbatches)
    for _ in range(pp - rank - 1): program.forward(rank)
    for _ in range(microbatches): program.forward(rank); program.backward(rank)
    return program


def looped_bfs(rank: int, pp: int, microbatches: int, chunks: int) -> Program:
    """Breadth first: all micro-batches through a rank's first stage, then all through its next (Lamy-Poirier 2022,
    arXiv:2211.05953). The gradients of later chunks are complete early, so that there is time to reduce them.

    Idle: (p - 1) (F + B) / v, which is (p - 1) / (v m) of the rank's work, if m >= p. Activations: v m.
    """
    program, stages = Program(microbatches), range(rank, pp * chunks, pp)
    for stage in stages:
        for _ in range(microbatches):
            program.forward(stage)
    for stage in reversed(stages):
        for _ in range(microbatches):
            program.backward(stage)
    return program


def schedule_table(microbatches: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    """The order of (micro-batch, chunk) in which a rank of an interleaved schedule does its forwards: a group of
    micro-batches through the first chunk, the same group through the next one, ..., then the next group.

    Backwards have the same order, but with the chunks counted from the last one.
    """
    groups = [range(i, min(i + group_size, microbatches)) for i in range(0, microbatches, group_size)]
    return [(i, chunk) for group in groups for chunk in range(chunks) for i in group]


def signed_order(table: list[tuple[int, int]], chunks: int, warmup: int) -> list[int]:
    """A rank's actions by the numbers of their chunks, from 1: 2 is a forward of the second chunk, -2 a backward.

    Args:
        table: of `schedule_table`.
        warmup: how many forwards come before the first pair of a forward and a backward.
    """
    forwards = [chunk + 1 for _, chunk in table]
    backwards = [chunk - chunks for _, chunk in table]
    pairs = itertools.zip_longest(forwards[warmup:], backwards, fillvalue=0)
    return forwards[:warmup] + [number for pair in pairs for number in pair if number]


def interleaved_1f1b(rank: int, pp: int, microbatches: int, chunks: int, group_size: int | None = None) -> Program:
    """1F1B with several stages per rank: smaller ones fill and drain sooner (Narayanan et al. 2021, arXiv:2104.04473).

    Idle: (p - 1) (F + B) / v, which is (p - 1) / (v m) of the rank's work, if m is a multiple of g.
    Activations: (v - 1) g + 2 (p - rank) - 1, at most v m.

    Args:
        group_size: g, how many micro-batches go through a chunk before it is the next one's turn; by default p.
    """
    program, group_size = Program(microbatches), pp if group_size is None else group_size
    if group_size < min(pp, microbatches):
        raise UserError(
            f"a group of {group_size} micro-batches is over before the first one has passed pp_size={pp} stages; "
            f"use a group_size of at least {min(pp, microbatches)}"
        )
    full_groups = -(-microbatches // group_size) * group_size  # the program leaves out what there is not
    warmup = (chunks - 1) * group_size + 2 * (pp - rank - 1)
    for number in signed_order(schedule_table(full_groups, chunks, group_size), chunks, warmup):
        append = program.forward if number > 0 else program.backward
        append(rank + pp * (abs(number) - 1))
    return program


def zb_h1(rank: int, pp: int, microbatches: int) -> Program:
    """1F1B with split backwards: W, for which nobody waits, comes late and fills the time at the end that 1F1B wastes
    (Qi et al. 2023, arXiv:2401.10241).

    Idle: (p - 1) (F + I - W), a third of 1F1B's if F = I = W, for m >= p. Activations: p, at most m.
    """
    program = Program(microbatches)
    for _ in range(pp - rank - 1): program.forward(rank)
    for _ in range(microbatches):
        program.forward(rank); program.backward_input(rank); program.backward_weight(keep=rank)
    program.all_backward_weights()
    return program


def zbv(rank: int, pp: int, microbatches: int) -> Program:
    """Zero bubble in a V: stages go down through the ranks and up again, so that the first rank also has the last stage
    and starts its backwards early (ZB-V in Qi et al. 2023, arXiv:2401.10241; Qi et al. 2024, arXiv:2405.15362).

    Idle: nothing between the first and the last action of any rank, if F = I = W and m >= 2 p - 1. The step takes
    (p - 1) F / 2 longer than a rank's work, as the last rank starts so much later. Activations: 2 p, at most 2 m.
    """
    program, down, up = Program(microbatches), rank, 2 * pp - 1 - rank
    for _ in range(2 * (pp - rank) - 1): program.forward(down)
    for _ in range(rank): program.forward(up); program.forward(down)
    for _ in range(pp - rank): program.forward(up); program.backward_input(up); program.backward_weight()
    for _ in range(max(microbatches, 2 * pp - 1) - pp):  # the steady state
        for stage in (down, up): program.forward(stage); program.backward_input(stage); program.backward_weight()
    for _ in range(rank): program.backward_input(down); program.backward_input(up)
    for _ in range(pp - rank): program.backward_input(down); program.backward_weight()
    program.all_backward_weights()
    return program


def dualpipev(rank: int, pp: int, microbatches: int) -> Program:
    """A V in which forwards and backwards overlap, so that communication inside of stages, like that of experts, hides
    behind computation (DeepSeek-AI 2024, arXiv:2412.19437; as a V in their DualPipe repository, 2025).

    Idle: (p - 1) (X + B - 3 W) / 2, where X is the time of overlapped pairs (F + B if nothing is gained), if
    F = I >= W and m >= 2 p; ranks before the last one have less if X < F + B. Activations: 2 p + 1, at most 2 m.
    """
    program, down, up = Program(microbatches), rank, 2 * pp - 1 - rank
    for _ in range(2 * (pp - rank - 1)): program.forward(down)
    for _ in range(rank + 1): program.forward(down); program.forward(up)
    for _ in range(pp - rank - 1): program.backward_input(up); program.backward_weight(); program.forward(up)
    pairs = max(microbatches, 2 * pp) - 2 * pp + rank + 1
    if rank == pp - 1:  # its first gradient is still on its way, and this forward need not wait
        program.forward(down); program.backward(up); program.overlapped(up, down)
        pairs -= 1
    for _ in range(pairs): program.overlapped(down, up); program.overlapped(up, down)
    for _ in range(pp - rank - 1): program.backward(up); program.overlapped(up, down)
    for i in range(2 * (rank + 1)):  # no forwards are left; from the middle on W waits, to fill the gaps at the end
        (program.backward if i <= rank else program.backward_input)(down if i % 2 else up)
    for _ in range(pp - rank - 1): program.backward_weight(); program.backward_input(down)
    program.all_backward_weights()
    return program


# fmt: on


class Recipe(NamedTuple):
    """How to build a schedule."""

    program: Callable[..., Program]
    chunks: int = 1  # per rank
    any_chunks: bool = False  # other numbers work as well
    placement: Placement = "loop"


SCHEDULES = {
    "afab": Recipe(afab),
    "1f1b": Recipe(one_f_one_b),
    "looped_bfs": Recipe(looped_bfs, chunks=2, any_chunks=True),
    "interleaved_1f1b": Recipe(interleaved_1f1b, chunks=2, any_chunks=True),
    "zb_h1": Recipe(zb_h1),
    "zbv": Recipe(zbv, chunks=2, placement="V"),
    "dualpipev": Recipe(dualpipev, chunks=2, placement="V"),
}


def check_name(name: str) -> str:
    """Return `name` if it names a schedule: a key of SCHEDULES, or csv:FILE.

    Raises:
        UserError: it does not.
    """
    if name in SCHEDULES or re.match("csv:.", name):
        return name
    raise UserError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}, or csv:FILE")


def build(name: str, pp: int, microbatches: int, chunks: int | None = None, group_size: int | None = None) -> Schedule:
    """A schedule of SCHEDULES.

    Args:
        pp: ranks of the pipeline.
        microbatches: of one step.
        chunks: stages of each rank; by default that of SCHEDULES.
        group_size: only for interleaved_1f1b, see there.

    Raises:
        UserError: there is no such schedule, or not for these numbers.
    """
    if check_name(name) not in SCHEDULES:
        raise UserError(f"the schedule {name!r} is a file; read it with `read_csv`")
    recipe = SCHEDULES[name]
    chunks = recipe.chunks if chunks is None else chunks
    _check_numbers(pp, microbatches, chunks)
    if chunks != recipe.chunks and not recipe.any_chunks:
        flexible = " or ".join(other for other in SCHEDULES if SCHEDULES[other].any_chunks)
        raise UserError(f"{name} has {recipe.chunks} chunk(s) per rank, not {chunks}; for {chunks} use {flexible}")
    if group_size is not None and name != "interleaved_1f1b":
        raise UserError(f"group_size={group_size} is for interleaved_1f1b, not for {name}; leave it out")
    options = {"chunks": chunks} if recipe.any_chunks else {}
    options |= {} if group_size is None else {"group_size": group_size}
    programs = [recipe.program(rank, pp, microbatches, **options) for rank in range(pp)]
    return Schedule(programs, microbatches, chunks, recipe.placement)


def forward_only(pp: int, microbatches: int, chunks: int = 1, placement: Placement = "loop") -> Schedule:
    """The schedule of an evaluation, for stages that are placed as in training. Forwards have the order in which they
    could run if every stage had a rank of its own.

    Idle: (p - 1) F / v in a loop, if m is a multiple of p.
    """
    _check_numbers(pp, microbatches, chunks)
    earliest_first = sorted(
        (Action("F", stage, i) for stage in range(pp * chunks) for i in range(microbatches)),
        key=lambda action: (action.stage + action.microbatch, action.microbatch),
    )
    programs = [[a for a in earliest_first if rank_of(a.stage, pp, placement) == rank] for rank in range(pp)]
    return Schedule(programs, microbatches, chunks, placement, forward_only=True)


def _check_numbers(pp: int, microbatches: int, chunks: int) -> None:
    if min(pp, microbatches, chunks) < 1:
        raise UserError(f"pp={pp}, microbatches={microbatches} and chunks={chunks} must be at least 1 each")
