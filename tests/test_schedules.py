"""Schedules as data: their orders beside torch's and our own loops, the checker, the messages, the CSV files."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from picotron.config import UserError
from picotron.pipeline_parallel.actions import Action, AnyAction, Overlapped, Schedule, parse_action
from picotron.pipeline_parallel.checker import add_communication, check
from picotron.pipeline_parallel.schedule_csv import read_csv, write_csv
from picotron.pipeline_parallel.schedules import SCHEDULES, build, forward_only, schedule_table, signed_order
from picotron.pipeline_parallel.simulate import simulate
from tests.test_pipeline_order import GRID as LOOP_GRID
from tests.test_pipeline_order import STEPS, trace


def names(program: list[AnyAction]) -> list[str]:
    return [str(action) for action in program]


def schedule_of(*lines: str, **more: object) -> Schedule:
    """From one line of actions per rank."""
    programs = [[parse_action(cell) for cell in line.split(",")] for line in lines]
    parts = [part for program in programs for action in program for part in action.parts]
    chunks = (1 + max(part.stage for part in parts)) // len(programs)
    return Schedule(programs, 1 + max(part.microbatch for part in parts), chunks, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- beside others


def order_of_torch(schedule: type, rank: int, pp: int, microbatches: int, chunks: int, group_size: int) -> list[str]:
    numbers = SimpleNamespace(
        n_local_stages=chunks, microbatches_per_round=group_size, pp_group_size=pp, _n_microbatches=microbatches
    )
    actions = schedule._calculate_single_rank_operations(numbers, rank)  # type: ignore[attr-defined]
    return names([parse_action(repr(action)) for action in actions if action is not None])


@pytest.mark.parametrize(
    ("name", "theirs", "all_chunks", "fewest"),
    [
        ("interleaved_1f1b", torch_schedules.ScheduleInterleaved1F1B, (1, 2, 3, 4), lambda pp: 1),
        ("zb_h1", torch_schedules.ScheduleInterleavedZeroBubble, (1,), lambda pp: 1),
        ("dualpipev", torch_schedules.ScheduleDualPipeV, (2,), lambda pp: 2 * pp),
    ],
)
def test_orders_equal_those_of_torch(name: str, theirs: type, all_chunks: tuple[int, ...], fewest: object) -> None:
    compared = 0
    for pp in (2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24):
            rounds = max(1, microbatches // pp)
            if microbatches % rounds or microbatches < fewest(pp):  # type: ignore[operator]
                continue  # torch refuses
            group_size = microbatches // rounds if name == "interleaved_1f1b" else None
            for chunks in all_chunks:
                schedule = build(name, pp, microbatches, chunks, group_size)
                for rank, program in enumerate(schedule.programs):
                    expected = order_of_torch(theirs, rank, pp, microbatches, chunks, microbatches // rounds)
                    assert names(program) == expected, (name, pp, microbatches, chunks, rank)
                compared += 1
    assert compared >= 12


@pytest.mark.parametrize("engine", STEPS)
def test_the_loops_in_pipeline_parallel_do_what_the_programs_say(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pp, microbatches in LOOP_GRID:
        for rank, program in enumerate(build(engine, pp, microbatches).programs):
            events = [e for e in trace(engine, rank, pp, microbatches, monkeypatch) if e[0] in "FB"]
            assert [f"{rank}{e.rstrip('*')}" for e in events] == names(program)


def test_schedule_table() -> None:
    """Two chunks, groups of three; the second group has two micro-batches."""
    table = schedule_table(microbatches=5, chunks=2, group_size=3)
    assert table == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    assert signed_order(table, chunks=2, warmup=4) == [
        *(1, 1, 1, 2),
        *(2, -2, 2, -2, 1, -2, 1, -1, 2, -1, 2, -1),
        *(-2, -2, -1, -1),
    ]
    assert signed_order(schedule_table(1, 1, 1), chunks=1, warmup=5) == [1, -1]


def test_how_actions_print() -> None:
    forward, backward = Action("F", 2, 3), Action("B", 1, 0)
    for action in (forward, backward, Action("R", 4), Action("SEND_F", 10, 12), Overlapped(forward, backward)):
        assert parse_action(str(action)) == action
    assert [str(forward), str(Action("R", 4)), str(Overlapped(forward, backward))] == ["2F3", "4R", "(2F3;1B0)"]
    assert parse_action("(2F3;1B0)OVERLAP_F_B") == Overlapped(forward, backward)
    for text in (
        "",
        "F",
        "2F",
        "2X0",
        "2F-1",
        "2F0 ",
        "(2F3,1B0)",
        "(2B3;1F0)",
        "(2F3;1B0",
        "2F0x",
        "-1F0",
        "2R0",
        "٢F0",
    ):
        with pytest.raises(ValueError, match="is not an action"):
            parse_action(text)


# -------------------------------------------------------------------------------------- every schedule can be run


def run_blocking(schedule: Schedule, programs: list[list[AnyAction]]) -> list[AnyAction]:
    """Run programs in the strictest network there is, where a send and its receive wait for each other; so each rank
    must receive what it is sent in the same order. An action must find its input on its rank. Returns what is left.
    """
    todo = [deque(program) for program in programs]
    results: list[set[Action]] = [set() for _ in todo]  # of each rank: computed there or received

    def run(rank: int, action: AnyAction) -> bool:
        for kind, stage, microbatch in action.parts:
            half = kind[-1].replace("I", "B")
            if kind.startswith("RECV"):
                return False  # its sender does both ends
            if kind.startswith("SEND"):
                target = stage + (1 if half == "F" else -1)
                receiver = schedule.rank_of(target)
                if not todo[receiver] or todo[receiver][0] != Action(f"RECV_{half}", target, microbatch):
                    return False
                assert Action(half, stage, microbatch) in results[rank]
                results[receiver].add(Action(half, stage, microbatch))
                todo[receiver].popleft()
            elif kind != "R":
                source = schedule.source(Action(kind, stage, microbatch))
                assert source is None or source in results[rank], f"{action} runs without {source}"
        results[rank] |= {part._replace(kind=part.kind.replace("I", "B")) for part in action.parts}
        todo[rank].popleft()
        return True

    while any(queue and run(rank, queue[0]) for rank, queue in enumerate(todo)):
        pass
    return [action for queue in todo for action in queue]


def assert_runs(schedule: Schedule) -> None:
    programs = add_communication(schedule)
    assert run_blocking(schedule, programs) == []
    for rank, program in enumerate(programs):
        assert [a for a in program if a.parts[0].kind in ("F", "B", "I", "W")] == list(schedule.programs[rank])
        reduced = [a.parts[0].stage for a in program if a.parts[0].kind == "R"]
        assert sorted(reduced) == ([] if schedule.forward_only else schedule.stages_of(rank))
        for stage in reduced:
            after = program[program.index(Action("R", stage)) :]
            assert not any(part.stage == stage and part.kind in ("B", "W") for a in after for part in a.parts)


small = {"pp": st.integers(1, 8), "microbatches": st.integers(1, 32)}


@settings(deadline=None, max_examples=150)
@given(name=st.sampled_from(list(SCHEDULES)), chunks=st.none() | st.integers(1, 4), **small)
def test_what_is_built_runs_and_what_is_refused_says_why(
    name: str, pp: int, microbatches: int, chunks: int | None
) -> None:
    fixed = chunks is not None and chunks != SCHEDULES[name].chunks and not SCHEDULES[name].any_chunks
    if fixed:
        with pytest.raises(
            UserError, match=rf"{name} has . chunk\(s\) per rank, not {chunks}; for {chunks} use looped_bfs"
        ):
            build(name, pp, microbatches, chunks)
    else:
        assert_runs(build(name, pp, microbatches, chunks))


@settings(deadline=None, max_examples=60)
@given(chunks=st.integers(1, 4), group_size=st.integers(0, 40), **small)
def test_groups_of_any_size_that_fills_the_pipeline(pp: int, microbatches: int, chunks: int, group_size: int) -> None:
    if group_size < min(pp, microbatches):
        with pytest.raises(UserError, match=f"use a group_size of at least {min(pp, microbatches)}"):
            build("interleaved_1f1b", pp, microbatches, chunks, group_size)
    else:
        assert_runs(build("interleaved_1f1b", pp, microbatches, chunks, group_size))


@settings(deadline=None, max_examples=60)
@given(chunks=st.integers(1, 4), placement=st.sampled_from(["loop", "V"]), **small)
def test_forward_only(pp: int, microbatches: int, chunks: int, placement: str) -> None:
    schedule = forward_only(pp, microbatches, chunks, placement)  # type: ignore[arg-type]
    assert_runs(schedule)
    idle = max(simulate(schedule).idle)
    ideal = placement == "loop" and microbatches % pp == 0
    assert idle <= (pp - 1) * (1 if ideal else chunks)


def test_wrong_numbers() -> None:
    for arguments, message in (
        (("1f1b", 4, 0), "pp=4, microbatches=0 and chunks=1 must be at least 1 each"),
        (("looped_bfs", 2, 4, 0), "chunks=0 must be at least 1"),
        (("gpipe", 2, 4), "there is no schedule 'gpipe'; choose one of afab, 1f1b, "),
        (("zb_h1", 2, 4, None, 2), "group_size=2 is for interleaved_1f1b, not for zb_h1; leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            build(*arguments)


# ------------------------------------------------------------------------------------------------------ faults

FAULTS = [
    (["0F0", "1F0,1B0"], "rank 0 lacks 0B0 (or 0I0 and 0W0), the backward of micro-batch 0 in stage 0"),
    (["0F0,0B0", "1B0"], "rank 1 lacks 1F0, the forward of micro-batch 0 through stage 1"),
    (["0F0,0F0,0B0", "1F0,1B0"], "rank 0 has 0F0 twice"),
    (["0F0,0B0,0B0", "1F0,1B0"], "rank 0 has 0B0 twice"),
    (["0F0,0I0", "1F0,1B0"], "rank 0 has 0I0, but lacks 0W0, the other half of that backward"),
    (["0F0,0W0", "1F0,1B0"], "rank 0 has 0W0, but lacks 0I0, the other half of that backward"),
    (["0F0,0B0,0W0", "1F0,1B0"], "rank 0 has both 0B0, a whole backward, and 0W0"),
    (["0F0,0W0,0I0", "1F0,1B0"], "rank 0 has 0W0 too early: it must come after 0I0"),
    (["0F0,0B0", "1B0,1F0"], "rank 1 has 1B0 too early: it must come after 1F0"),
    (["0F0,0B0", "(1F0;1B0)"], "rank 1 has 1B0 too early: it must come after 1F0"),
    (["1F0,1B0", "0F0,0B0"], "rank 0 has 1F0, but stage 1 is on rank 1 (loop placement)"),
    (["0F0,0SEND_F0,0B0", "1F0,1B0"], "rank 0 has 0SEND_F0; leave it out: messages and reductions are added by"),
    (["0F0,0B0,0R", "1F0,1B0"], "rank 0 has 0R; leave it out"),
    (["0F0,0F2,0B0,0B2", "1F0,1F2,1B0,1B2"], "rank 0 lacks 0F1, the forward of micro-batch 1 through stage 0"),
]


@pytest.mark.parametrize(("lines", "message"), FAULTS)
def test_each_fault_has_its_sentence(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        check(schedule_of(*lines))
    assert message in str(raised.value)
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError) as raised:
        read_csv(path)
    assert f"the schedule '{path}' cannot run: {message}" in str(raised.value)


def test_faults_that_a_file_cannot_have() -> None:
    evaluation = forward_only(2, 1)
    with pytest.raises(UserError, match="rank 1 has 1B0, but an evaluation has no backwards"):
        check(Schedule([evaluation.programs[0], [*evaluation.programs[1], Action("B", 1)]], 1, forward_only=True))
    with pytest.raises(UserError, match="rank 0 has 0F1, but there are 2 stages and 1 micro-batches"):
        check(Schedule([[Action("F", 0, 1)], []], 1))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["0F0,0B0,0F1,0B1", "1F0,1F1,1B1,1B0"],
            "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0; "
            "put 1B0 before 1F1 in the program of rank 1",
        ),
        (  # the rank that comes first waits for the circle, but is not in it
            ["0F0,0F1,0B0,0B1", "1F0,1I0,1W0,1F1,1B1", "2F1,2F0,2I0,2W0,2B1"],
            "deadlock: rank 1 waits at 1I0 for 2I0 of rank 2, which waits at 2F1 for 1F1 of rank 1; "
            "put 2I0 before 2F1 in the program of rank 2",
        ),
        (
            ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1", "2F1,2F0,2B0,2B1"],
            "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0; "
            "put 1B0 before 1F1 in the program of rank 1",
        ),
        (
            ["0F0,0F1,2F1,(2F0;2B1),2B0,0B0,0B1", "1F1,3F1,3B1,(1F0;1B1),3F0,3B0,1B0"],
            "deadlock: rank 0 waits at (2F0;2B1) for (1F0;1B1) of rank 1, which waits at (1F0;1B1) for (2F0;2B1) of "
            "rank 0; take the pair (2F0;2B1) apart",
        ),
        (
            ["2F0,0F0,0B0,2B0", "1F0,3F0,3B0,1B0"],
            "rank 0 waits at 2F0 for 1F0 of rank 1, which waits at 1F0 for 0F0 of",
        ),
        (["1F0,0F0,1B0,0B0"], "deadlock: rank 0 waits at 1F0 for 0F0 of rank 0; put 0F0 before 1F0 in the program of"),
    ],
)
def test_a_deadlock_is_refused_with_its_circle(lines: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        check(schedule_of(*lines))
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name: str, tmp_path: Path) -> None:
    for pp, microbatches, chunks in ((1, 1, None), (2, 5, None), (4, 8, None), (3, 7, 3)):
        if chunks is None or SCHEDULES[name].any_chunks:
            schedule = build(name, pp, microbatches, chunks)
            write_csv(schedule.programs, tmp_path / "schedule.csv")
            again = read_csv(tmp_path / "schedule.csv")
            assert [list(program) for program in again.programs] == [list(program) for program in schedule.programs]
            assert (again.microbatches, again.chunks) == (microbatches, schedule.chunks)
            assert [again.rank_of(i) for i in range(again.num_stages)] == [
                schedule.rank_of(i) for i in range(schedule.num_stages)
            ]


def test_a_file_as_a_spreadsheet_or_torch_writes_it(tmp_path: Path) -> None:
    """A byte-order mark, quotes, spaces, empty cells and lines at the end; torch's name of overlapped pairs."""
    path = tmp_path / "own.csv"
    path.write_text('\ufeff0F0,"0F1", 0B0,,0B1\r\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\r\n\r\n')
    assert [names(list(program)) for program in read_csv(path).programs] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "(1F1;1B0)", "1B1"],
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "0F0,0B0\n1F0,1X0",
            "has '1X0' in line 2, column 2; expected stage, kind (F, B, I or W) and micro-batch like 2F0",
        ),
        ("0F0,,(0B0;1F0)", "has '(0B0;1F0)' in line 1, column 3; expected stage, kind"),
        ("0F0;0B0", "has '0F0;0B0' in line 1, column 1; expected"),
        ("", "is empty; expected a line of actions like 0F0,0B0 for each rank"),
        (",,\n,", "is empty; expected"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0", "has 3 stages on 2 ranks (lines); every rank needs as many as the others"),
        ("0F0,0B0\n\n1F0,1B0", "has 2 stages on 3 ranks (lines)"),
        ('0F0,"0B0', "cannot read the schedule"),
        (b"\xff\xfe", "cannot read the schedule"),
        ("999999F0\n0F999999", "cannot run: rank 0 has 999999F0, but stage 999999 is on rank 1 (loop placement)"),
    ],
)
def test_a_malformed_file_is_refused(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as raised:
        read_csv(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the schedule .*own.csv.*No such file"):
        read_csv(tmp_path / "own.csv")


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(list(SCHEDULES)), pp=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_a_schedule_that_somebody_changed_runs_or_is_refused(
    data: st.DataObject, name: str, pp: int, microbatches: int
) -> None:
    """Actions are exchanged, left out or repeated."""
    original = build(name, pp, microbatches)
    programs = [list(program) for program in original.programs]
    for _ in range(data.draw(st.integers(1, 3))):
        program = data.draw(st.sampled_from(programs))
        i, j = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["swap", "swap", "swap", "drop", "repeat"])):
            case "swap":
                program[i], program[j] = program[j], program[i]
            case "drop" if len(program) > 1:
                del program[i]
            case "repeat":
                program.insert(j, program[i])
    schedule = Schedule(programs, microbatches, original.chunks, original.placement)
    try:
        check(schedule)
    except UserError as error:
        why = str(error)
    else:
        why = ""
        assert_runs(schedule)
    assert why == "" or why.startswith(("rank ", "deadlock: rank "))
