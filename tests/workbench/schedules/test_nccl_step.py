"""Steps on NCCL, by hand: messages of a communicator queue; and hangs are errors."""

from pathlib import Path

import pytest

from workbench.drawing.__main__ import main
from workbench.schedules.actions import Schedule
from workbench.schedules.nccl_step import Communicators, simulate_nccl
from workbench.schedules.schedules import build, forward_only
from workbench.schedules.simulate import Costs, computes


@pytest.mark.parametrize(
    ("schedule", "rank", "communicators", "ends"),
    [
        (forward_only(3, 3), 2, "one", [6, 8, 10]),
        (forward_only(3, 3), 2, "directions", [6, 8, 10]),
        (forward_only(3, 3), 2, "pairs", [5, 7, 9]),
        (build("1f1b", 2, 3), 0, "one", [1, 2, 8, 9, 13, 16]),
        (build("1f1b", 2, 3), 0, "directions", [1, 2, 8, 9, 12, 16]),
    ],
)
def test_messages_of_a_communicator_queue(
    schedule: Schedule, rank: int, communicators: Communicators, ends: list[float]
) -> None:
    """A message takes 1. Rank 1 of three has 1F0 at 3: it is sent until 4, but in a stream with its receives after that
    of 0F1, until 5. In 1F1B, 1B1 is ready at 8, and rank 0 receives it from 9 to 10, after 0F2: in one stream only
    after rank 1 has received 0F2, until 11.
    """
    played = simulate_nccl(schedule, Costs(p2p=1.0), [], communicators)
    assert [span.end for span in played.spans[rank] if computes(span.action)] == ends


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0", "pp rank 1 has 1F0 before it has the result of 0F0"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "pp rank 0 has 0SEND_F0 before it has"),
        ("0F0,0SEND_F0,0SEND_B0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_B0, but no stage is at the other end"),
        ("0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "for which rank 1 has no call"),
        ("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "rank 0 waits in receive of 1B0 from rank 1"),
    ],
)
def test_messages_that_cannot_pass_are_errors(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    main(["csv", str(path)])  # without NCCL, messages do not count
    with pytest.raises(SystemExit, match=message):
        main(["csv", str(path), "--nccl", "one"])
