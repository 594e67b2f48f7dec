"""Schedules as CSV files, with one line per rank and one cell per action, so that you can write your own:

0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1

torch.distributed.pipelining reads and writes the same format (`compute_only`). Of its format `compute_comms`, the cells
of FSDP, of reductions and (except by `nccl_step`) of messages are ignored: `checker` adds messages and reductions.
"""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from picotron.console import UserError
from workbench.console import first_line
from workbench.schedules.actions import AnyAction, Overlapped, Placement, Schedule, parse_action
from workbench.schedules.checker import check

_ADDED = re.compile(r"[0-9]+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB][0-9]+)")  # of torch's `compute_comms`


def as_csv(programs: Sequence[Sequence[AnyAction]]) -> str:
    """Return the contents of a schedule's CSV file. An overlapped pair ends in OVERLAP_F_B, as torch requires."""
    lines = [[f"{a}OVERLAP_F_B" if isinstance(a, Overlapped) else str(a) for a in program] for program in programs]
    return "".join(",".join(line) + "\n" for line in lines)


def read_csv(path: str | Path) -> Schedule:
    """Read and check a schedule for training. Empty cells are ignored, and so are torch's messages and reductions.

    Stages are placed in a V if the last rank has the first stage of the second chunk, else in a loop, see `rank_of`.

    Raises:
        UserError: the file cannot be read, a cell is not an action, or `check` finds a fault in the schedule.
    """
    return assemble(read_programs(path), f"{str(path)!r}")


def read_programs(path: str | Path) -> list[list[AnyAction]]:
    """Read the programs of a CSV file, with the messages that it has. Raises a UserError as `parse_csv` does."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the schedule {str(path)!r}: {first_line(error)}; check the file") from None
    return parse_csv(text, f"{str(path)!r}")


def parse_csv(text: str, name: str) -> list[list[AnyAction]]:
    """Return the programs that the text of a CSV file holds, unchecked. Raises a UserError as `read_csv` does."""
    try:
        lines = list(csv.reader(text.rstrip().splitlines(), strict=True))
    except csv.Error as error:
        raise UserError(f"cannot read the schedule {name}: {first_line(error)}") from None
    return [_program(name, number, cells) for number, cells in enumerate(lines, start=1)]


def assemble(programs: Sequence[Sequence[AnyAction]], name: str) -> Schedule:
    """Check the programs of a schedule for training, and find the placement of its stages, see `read_csv`."""
    schedule = arrange(programs, name)
    try:
        check(schedule)
    except UserError as fault:
        raise UserError(f"the schedule {name} cannot run: {fault}") from None
    return schedule


def arrange(programs: Sequence[Sequence[AnyAction]], name: str) -> Schedule:
    """Find the numbers and the placement of the stages that programs are for, and leave out messages. `check` says
    whether they can run.

    Raises:
        UserError: the programs are empty, or the ranks cannot have the same number of stages.
    """
    programs = [[action for action in program if not is_message(action)] for program in programs]
    parts = [part for program in programs for action in program for part in action.parts]
    if not parts:
        raise UserError(f"the schedule {name} is empty; expected a line of actions like 0F0,0B0 for each pp rank")
    pp, num_stages = len(programs), 1 + max(part.stage for part in parts)
    if num_stages % pp:
        raise UserError(
            f"the schedule {name} has {num_stages} stages on {pp} pp ranks (lines); every pp rank must have the same number of stages"
        )
    in_a_v = pp > 1 and any(part.stage == pp for action in programs[-1] for part in action.parts)
    placement: Placement = "V" if in_a_v else "loop"
    return Schedule(programs, 1 + max(part.micro_batch for part in parts), num_stages // pp, placement)


def is_message(action: AnyAction) -> bool:
    return "_" in action.parts[0].kind


def _program(name: str, line: int, cells: Sequence[str]) -> list[AnyAction]:
    program: list[AnyAction] = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip() or _ADDED.fullmatch(cell.strip()):
            continue
        try:
            program.append(parse_action(cell.strip()))
        except ValueError:
            raise UserError(
                f"the schedule {name} has {cell.strip()!r} in line {line}, column {column}; expected stage, kind "
                f"(F, B, I or W) and micro-batch like 2F0, an overlapped pair like (2F3;1B0), or an empty cell"
            ) from None
    return program
