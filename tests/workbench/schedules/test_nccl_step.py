"""Steps on NCCL take as long as those of threads that pass messages in the same order, and hangs are errors."""

import queue
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from benchmarks.torch_schedules import CLASSES, torch_programs
from workbench.drawing.__main__ import main
from workbench.schedules.actions import Action, AnyAction, Schedule
from workbench.schedules.checker import MAX_SENDS_IN_FLIGHT, add_communication
from workbench.schedules.nccl_step import COMMUNICATORS, Communicators, simulate_nccl
from workbench.schedules.schedule_csv import assemble
from workbench.schedules.schedules import build
from workbench.schedules.simulate import Costs, computes

MESSAGE = 0.25


@pytest.mark.parametrize("communicators", COMMUNICATORS)
@pytest.mark.parametrize("name", CLASSES)
def test_steps_take_as_long_as_those_of_threads(name: str, communicators: Communicators) -> None:
    """picotron's order of the messages, and torch's."""
    draw = random.Random(name)
    costs = Costs(p2p=MESSAGE, weights=[draw.uniform(0.5, 1.5) for _ in range(6)])
    for programs in ([], torch_programs(name, 3, 6)):
        schedule = assemble(programs, name) if programs else build(name, 3, 6, 2)
        played = simulate_nccl(schedule, costs, programs, communicators)
        ends = {(rank, action): end for rank, spans in enumerate(played.spans) for action, _, end in spans}
        expected = run_threads(schedule, programs, costs, communicators)
        assert {key: end for key, end in ends.items() if computes(key[1])} == pytest.approx(expected)


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


def run_threads(
    schedule: Schedule, programs: Sequence[Sequence[AnyAction]], costs: Costs, communicators: Communicators
) -> dict[tuple[int, AnyAction], float]:
    """Return when each computation ends if each rank and each of its streams is a thread, with a clock of its own. The
    two ends of a message tell each other their times, and then both have the later one.
    """
    sends = 99 if programs else MAX_SENDS_IN_FLIGHT
    programs = programs or add_communication(schedule)
    ends: dict[tuple[int, AnyAction], float] = {}
    letters: dict[tuple[Action, int], queue.Queue[float]] = {}  # to a rank, from the other end of a message

    def letter(result: Action, rank: int) -> queue.Queue[float]:
        return letters.setdefault((result, rank), queue.Queue())

    def stream(calls: queue.Queue[tuple[Action, int, float, Future[float]]], rank: int) -> None:
        clock = 0.0
        while True:
            result, other, called, done = calls.get()
            clock = max(clock, called)
            letter(result, other).put(clock)
            clock = max(clock, letter(result, rank).get()) + MESSAGE
            done.set_result(clock)

    def run(rank: int) -> None:
        clock, streams, received = 0.0, {}, dict[Action | None, Future[float]]()
        sent: dict[int, list[Future[float]]] = defaultdict(list)
        for action in programs[rank]:
            (part, *_) = action.parts
            if computes(action):
                needed = [received[s] for s in map(schedule.source, action.parts) if s in received]
                clock = max([clock, *(each.result(20) for each in needed)]) + costs.of(action)
                ends[rank, action] = clock
            elif part.kind != "R":
                result, done = part._replace(kind=part.kind[-1]), Future[float]()
                if sending := part.kind.startswith("SEND"):
                    other = schedule.rank_of(schedule.target(result))
                    while len(sent[other]) >= sends:
                        clock = max(clock, sent[other].pop(0).result(20))
                    sent[other].append(done)
                else:
                    result = schedule.source(result)
                    other, received[result] = schedule.rank_of(result.stage), done
                key = {"one": None, "pairs": other, "directions": (rank < other) == sending}[communicators]
                if key not in streams:
                    streams[key] = queue.Queue()
                    threading.Thread(target=stream, args=(streams[key], rank), daemon=True).start()
                streams[key].put((result, other, clock, done))

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(schedule.pp)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return ends
