"""NCCL's rules of order: play the programs of all ranks on them, and find out when every rank finishes, and whether.

`nccl_step` makes the programs of a schedule. The rules are those of PyTorch [P] and NCCL [N], each in its worst case:

- Each process group has one stream per rank. Its operations run there one after the other, in the order of the calls.
  An operation starts when the compute stream has reached the call and the previous operation of the stream has ended.
  (Recent versions of PyTorch run collectives without async_op in the compute stream. This makes no difference, because
  NCCL never runs two operations of one communicator at the same time.)
- A collective ends when all ranks of the group have started it. A message ends when its sender and its receiver have
  started it; nothing is buffered, although NCCL buffers small messages. A batch ends when all its messages have ended,
  which do not wait for each other. [N, Point-to-point communication]
- `Work.wait()` makes the compute stream wait, not the CPU. [P, Synchronous and asynchronous collective operations] If
  the CPU waited, too, the same programs would hang: an operation that is called after a wait starts after it anyway.
- The first operation of a group creates its communicator, for which the CPU waits for all ranks of the group. It must
  not be a batch of messages, in which some ranks may not take part. [P, batch_isend_irecv]
- Operations of different groups run independently, or, with `one_at_a_time`, also one after the other. NCCL promises
  only the latter, because operations of several communicators may not fit on a GPU together. So all ranks must call
  them in an order in which they can run one at a time. [N, Using multiple NCCL communicators concurrently] This assumes
  that a GPU starts operations in the order of the calls, as with NCCL_LAUNCH_ORDER_IMPLICIT=1, or that all operations
  in flight fit, see `most_in_flight`.

No rule involves a choice: each operation has its place in one stream, and its partners on other ranks. So whether all
ranks finish does not depend on the durations of computations and messages.

[P] https://docs.pytorch.org/docs/stable/distributed.html
[N] https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage.html
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from picotron.console import UserError
from workbench.schedules.nccl_calls import (
    Compute,
    Event,
    Meeting,
    Meetings,
    Operation,
    Program,
    Wait,
    creation,
    match,
    operations,
)


class Rank:
    """The state of one rank: its compute stream, and the streams of its groups.

    Attributes:
        position: index of the event that the compute stream has reached.
        time: time on the compute stream.
        streams: operations that have been called and have not ended, with the times of their calls, by stream.
        free: time at which the last operation of each stream ended.
        ended: times at which operations ended, by handle.
        spans: computations and operations, with the times of their starts and ends.
    """

    def __init__(self, number: int, program: Program, meetings: Meetings) -> None:
        self.number, self.program, self.meetings = number, program, meetings
        self.position, self.time = 0, 0.0
        self.streams: dict[str, deque[tuple[Operation, float]]] = defaultdict(deque)
        self.free: dict[str, float] = defaultdict(float)
        self.ended: dict[int, float] = {}
        self.spans: list[tuple[Compute | Operation, float, float]] = []
        self.by_handle = {operation.handle: operation for operation in operations(program)}


class Play:
    """One step of all ranks.

    Args:
        cost: function that returns the time that the compute stream needs for an event: a computation, or that between
            two calls.
        one_at_a_time: whether an operation waits for the earlier operations of other groups, too.
        message: time that a message takes, from when both ends have started it.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        cost: Callable[[Event], float] = lambda event: float(isinstance(event, Compute)),
        one_at_a_time: bool = False,
        message: float = 0.0,
    ) -> None:
        self.ranks = [Rank(i, *each) for i, each in enumerate(zip(programs, match(programs), strict=True))]
        self.cost, self.one_at_a_time, self.message = cost, one_at_a_time, message
        self.arrived: dict[Meeting, dict[int, float]] = defaultdict(dict)
        self.ends: dict[Meeting, float] = {}

    def run(self) -> float:
        """Play all programs, and return the time at which the last rank finishes.

        Raises:
            UserError: some ranks never finish.
        """
        while any(self.advance(rank) for rank in self.ranks):
            pass
        stuck = [rank for rank in self.ranks if rank.position < len(rank.program)]
        if stuck:
            waits = [f"rank {rank.number} waits in {self.obstacle(rank)}" for rank in stuck]
            raise UserError("deadlock: " + ",\n".join(waits))
        return max(rank.time for rank in self.ranks)

    def advance(self, rank: Rank) -> bool:
        """Run a rank until it waits for another one. Returns whether anything happened."""
        happened = False
        while self.advance_streams(rank) or self.advance_compute(rank):
            happened = True
        return happened

    def advance_compute(self, rank: Rank) -> bool:
        """Run the next event of the compute stream, unless the event waits."""
        if rank.position == len(rank.program):
            return False
        event = rank.program[rank.position]
        if isinstance(event, Wait):
            if event.handle not in rank.ended:
                return False
            rank.time = max(rank.time, rank.ended[event.handle])
        elif isinstance(event, Operation):
            created = self.meet(creation(event), rank, rank.time)
            if created is None:
                return False
            rank.time = max(rank.time, created)
            rank.streams[self.stream_of(event)].append((event, rank.time))
        start, rank.time = rank.time, rank.time + self.cost(event)
        if isinstance(event, Compute):
            rank.spans.append((event, start, rank.time))
        rank.position += 1
        return True

    def advance_streams(self, rank: Rank) -> bool:
        """Run the first operation of each stream, unless it waits for another rank."""
        happened = False
        for name, stream in rank.streams.items():
            while stream:
                operation, called = stream[0]
                start = max(called, rank.free[name])
                meetings = rank.meetings[operation.handle]
                ends = [end for meeting in meetings if (end := self.meet(meeting, rank, start)) is not None]
                if len(ends) < len(meetings):
                    break
                rank.ended[operation.handle] = rank.free[name] = max(ends)
                rank.spans.append((operation, start, max(ends)))
                stream.popleft()
                happened = True
        return happened

    def meet(self, meeting: Meeting, rank: Rank, time: float) -> float | None:
        """Let a rank arrive, and return when the meeting ends, or None if another rank has not arrived."""
        arrived = self.arrived[meeting]
        arrived.setdefault(rank.number, time)
        if len(arrived) < len(meeting.ranks):
            return None
        if meeting not in self.ends:
            self.ends[meeting] = max(arrived.values()) + self.message * (meeting.kind == "message")
        return self.ends[meeting]

    def stream_of(self, operation: Operation) -> str:
        return "all groups" if self.one_at_a_time else operation.group

    def obstacle(self, rank: Rank) -> Operation:
        """Return the operation that blocks a rank's compute stream: the first one in the stream that it waits for."""
        event = rank.program[rank.position]
        if isinstance(event, Wait):
            return rank.streams[self.stream_of(rank.by_handle[event.handle])][0][0]
        assert isinstance(event, Operation)
        return event
