"""NCCL's rules of order: play the programs of all ranks on them, and find out whether every rank finishes.

`nccl_programs` records the programs of real steps. The rules are those of PyTorch [P] and NCCL [N], each in its worst
case:

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
from collections.abc import Sequence

from tests.support.nccl_calls import Meeting, Operation, Program, Wait, creation, match, operations


class Deadlock(AssertionError):
    """Ranks that wait for each other."""


class Rank:
    """The state of one rank: its compute stream, and the streams of its groups.

    Attributes:
        position: index of the event that the compute stream has reached.
        streams: operations that have been called and have not ended, by stream.
        ended: handles of operations that have ended.
    """

    def __init__(self, number: int, program: Program, meetings: dict[int, list[Meeting]]) -> None:
        self.number, self.program, self.meetings, self.position = number, program, meetings, 0
        self.streams: dict[str, deque[Operation]] = defaultdict(deque)
        self.ended: set[int] = set()
        self.by_handle = {operation.handle: operation for operation in operations(program)}


class Play:
    """One step of all ranks.

    Args:
        one_at_a_time: whether an operation waits for the earlier operations of other groups, too.
    """

    def __init__(self, programs: Sequence[Program], one_at_a_time: bool = False) -> None:
        self.ranks = [Rank(i, *each) for i, each in enumerate(zip(programs, match(programs), strict=True))]
        self.one_at_a_time = one_at_a_time
        self.arrived: dict[Meeting, set[int]] = defaultdict(set)

    def run(self) -> None:
        """Play all programs.

        Raises:
            Deadlock: some ranks never finish.
        """
        while any(self.advance_streams(rank) or self.advance_compute(rank) for rank in self.ranks):
            pass
        stuck = [rank for rank in self.ranks if rank.position < len(rank.program)]
        if stuck:
            waits = [f"rank {rank.number} waits in {self.obstacle(rank)}" for rank in stuck]
            raise Deadlock("deadlock: " + ",\n".join(waits))

    def advance_compute(self, rank: Rank) -> bool:
        """Run the next event of the compute stream, unless the event waits. Returns whether it ran."""
        if rank.position == len(rank.program):
            return False
        event = rank.program[rank.position]
        if isinstance(event, Wait):
            if event.handle not in rank.ended:
                return False
        elif not self.meet(creation(event), rank):
            return False
        else:
            rank.streams[self.stream_of(event)].append(event)
        rank.position += 1
        return True

    def advance_streams(self, rank: Rank) -> bool:
        """Run the first operation of each stream, unless it waits for another rank. Returns whether any ran."""
        happened = False
        for stream in rank.streams.values():
            while stream:
                met = [self.meet(meeting, rank) for meeting in rank.meetings[stream[0].handle]]
                if not all(met):
                    break
                rank.ended.add(stream.popleft().handle)
                happened = True
        return happened

    def meet(self, meeting: Meeting, rank: Rank) -> bool:
        """Let a rank arrive, and return whether all ranks have."""
        self.arrived[meeting].add(rank.number)
        return len(self.arrived[meeting]) == len(meeting.ranks)

    def stream_of(self, operation: Operation) -> str:
        return "all groups" if self.one_at_a_time else operation.group

    def obstacle(self, rank: Rank) -> Operation:
        """Return the operation that blocks a rank's compute stream: the first one in the stream that it waits for."""
        event = rank.program[rank.position]
        if isinstance(event, Wait):
            return rank.streams[self.stream_of(rank.by_handle[event.handle])][0]
        return event
