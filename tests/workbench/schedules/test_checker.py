"""The checker: a schedule that cannot run is rejected with a message that names the fault."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron.console import UserError
from tests.support.messages import error_of
from tests.workbench.schedules.test_schedules import assert_runs
from workbench.schedules.actions import Schedule, parse_action
from workbench.schedules.checker import check
from workbench.schedules.schedule_csv import read_csv
from workbench.schedules.schedules import SCHEDULES, build


def schedule_of(*lines: str, **more: object) -> Schedule:
    """Build a schedule from one line of actions per rank."""
    programs = [[parse_action(cell) for cell in line.split(",")] for line in lines]
    parts = [part for program in programs for action in program for part in action.parts]
    chunks = (1 + max(part.stage for part in parts)) // len(programs)
    return Schedule(programs, 1 + max(part.micro_batch for part in parts), chunks, **more)  # type: ignore[arg-type]


FAULTS = [
    (["0F0", "1F0,1B0"], "pp rank 0 lacks 0B0 (or 0I0 and 0W0), the backward of micro-batch 0 in stage 0"),
    (["0F0,0I0", "1F0,1B0"], "pp rank 0 has 0I0, but lacks 0W0, the other half of that backward"),
    (["0F0,0W0,0I0", "1F0,1B0"], "pp rank 0 has 0W0 too early"),
    (["0F0,0B0", "(1F0;1B0)"], "pp rank 1 has 1B0 too early"),
    (["1F0,1B0", "0F0,0B0"], "pp rank 0 has 1F0, but stage 1 is on pp rank 1 (loop placement)"),
    (["0F0,0F2,0B0,0B2", "1F0,1F2,1B0,1B2"], "pp rank 0 lacks 0F1, the forward of micro-batch 1 through stage 0"),
]


def test_a_micro_batch_too_many_is_a_fault() -> None:
    more = schedule_of("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
    with pytest.raises(UserError, match="pp rank 0 has 0F1, but the schedule has 2 stages and 1 micro-batches"):
        check(dataclasses.replace(more, micro_batches=1))


@pytest.mark.parametrize(("lines", "message"), FAULTS)
def test_read_csv_names_the_fault(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines))
    assert f"the schedule '{path}' cannot run: {message}" in error_of(lambda: read_csv(path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["0F0,0B0,0F1,0B1", "1F0,1F1,1B1,1B0"],
            "deadlock: pp rank 0 waits at 0B0 for 1B0 of pp rank 1, which waits at 1F1 for 0F1 of pp rank 0; "
            "put 1B0 before 1F1 in the program of pp rank 1",
        ),
        (  # pp rank 0 waits for a rank of the cycle, but is not part of it
            ["0F0,0F1,0B0,0B1", "1F0,1I0,1W0,1F1,1B1", "2F1,2F0,2I0,2W0,2B1"],
            "deadlock: pp rank 1 waits at 1I0 for 2I0 of pp rank 2, which waits at 2F1 for 1F1 of pp rank 1; "
            "put 2F1 after 2I0 in the program of pp rank 2",
        ),
        (
            ["0F0,0F1,2F1,(2F0;2B1),2B0,0B0,0B1", "1F1,3F1,3B1,(1F0;1B1),3F0,3B0,1B0"],
            "deadlock: pp rank 0 waits at (2F0;2B1) for (1F0;1B1) of pp rank 1, which waits at (1F0;1B1) for (2F0;2B1) "
            "of pp rank 0; split the pair (2F0;2B1) into two actions",
        ),
    ],
)
def test_check_names_the_cycle_of_a_deadlock(lines: list[str], message: str) -> None:
    assert message in error_of(lambda: check(schedule_of(*lines)))


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(list(SCHEDULES)), pp=st.integers(1, 4), micro_batches=st.integers(1, 6))
def test_mutated_schedule_runs_or_is_rejected(data: st.DataObject, name: str, pp: int, micro_batches: int) -> None:
    """Mutations swap, drop or repeat actions."""
    original = build(name, pp, micro_batches)
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
    schedule = Schedule(programs, micro_batches, original.chunks, original.placement)
    if (why := error_of(lambda: check(schedule))) == "no error":
        assert_runs(schedule)
    else:
        assert why.startswith(("pp rank ", "deadlock: pp rank "))
