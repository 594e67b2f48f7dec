"""Schedules as CSV files: what is written can be read, and malformed files are rejected."""

import itertools
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import _add_send_recv, _PipelineScheduleRuntime, _simulate_comms_compute

from benchmarks.torch_schedules import CLASSES, torch_schedule
from picotron.console import UserError
from tests.workbench.schedules.test_schedules import names
from workbench.schedules.checker import add_communication
from workbench.schedules.schedule_csv import as_csv, read_csv
from workbench.schedules.schedules import SCHEDULES, build


def test_read_csv_accepts_files_of_spreadsheets_and_torch(tmp_path: Path) -> None:
    """A byte-order mark, quotes, spaces, empty cells, trailing empty lines, and torch's suffix of overlapped pairs."""
    path = tmp_path / "own.csv"
    path.write_text('\ufeff0F0,"0F1", 0B0,,0B1\r\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\r\n\r\n')
    assert [names(list(program)) for program in read_csv(path).programs] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "(1F1;1B0)", "1B1"],
    ]


# ------------------------------------------------------------------------------------ torch.distributed.pipelining


@pytest.mark.parametrize("name", SCHEDULES)
def test_files_are_read_by_us_and_by_torch(name: str, tmp_path: Path) -> None:
    """torch's loader checks the order of actions and adds messages; its simulator finds deadlocks."""
    path = tmp_path / "schedule.csv"
    for pp, m, chunks in itertools.product((2, 3, 4), (1, 4, 9), (1, 2, 3)):
        recipe = SCHEDULES[name]
        if chunks == recipe.chunks or recipe.any_chunks:
            schedule = build(name, pp, m, chunks)
            path.write_text(as_csv(schedule.programs))
            assert [list(program) for program in read_csv(path).programs] == list(map(list, schedule.programs))
            theirs = torch_schedule(_PipelineScheduleRuntime, pp, m, chunks)
            theirs.pipeline_order = {}
            theirs._load_csv(str(path))
            owners = {stage: schedule.rank_of(stage) for stage in range(schedule.num_stages)}
            assert theirs.stage_index_to_group_rank == owners
            if name != "dualpipev":  # torch's simulator knows no overlapped pairs
                with_messages = _add_send_recv(theirs.pipeline_order, owners.__getitem__, schedule.num_stages)
                _simulate_comms_compute(with_messages, owners.__getitem__, schedule.num_stages)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("looped_bfs", 3), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_h1", 3), ("zbv", 2), ("dualpipev", 2)],
)
def test_schedules_of_torch_are_read(name: str, chunks: int, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    for pp, groups in itertools.product((2, 4), (2, 3)):
        theirs = torch_schedule(CLASSES[name], pp, groups * pp, chunks)
        theirs._dump_csv(str(path), format="compute_comms")
        assert "SEND_F" in path.read_text()
        assert "REDUCE_GRAD" in path.read_text()
        schedule = read_csv(path)
        assert (schedule.pp, schedule.micro_batches, schedule.chunks) == (pp, groups * pp, chunks)
        assert schedule.placement == SCHEDULES[name].placement
        add_communication(schedule)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0F0,0B0\n1F0,1X0", "has '1X0' in line 2, column 2"),
        ("0F0,0B0\n\n1F0,1B0", "has 2 stages on 3 pp ranks (lines)"),
        ("999999F0\n0F999999", "stage 999999 is on pp rank 1"),
    ],
)
def test_read_csv_rejects_malformed_file(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as raised:
        read_csv(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
