"""Programs: what one rank asks of its GPU, in the order of the calls, and which calls of different ranks match.

Calls start computations and operations (a collective, or a batch of messages), or wait for operations.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from picotron.console import UserError


class Compute(NamedTuple):
    """A computation, such as 2F0."""

    action: str


class Part(NamedTuple):
    """A collective or a message, as one rank calls it."""

    operation: str  # "send", "receive" or the name of a collective
    tensor: str  # dtype and shape; of collectives, those of the full tensor
    peer: int | None = None  # rank at the other end of a message

    def __str__(self) -> str:
        direction = {"send": f" to rank {self.peer}", "receive": f" from rank {self.peer}"}
        return f"{self.operation} of {self.tensor}" + direction.get(self.operation, "")


class Operation(NamedTuple):
    """A collective, or the messages of one batch."""

    handle: int  # its number on this rank
    group: str  # name of the process group, the same on all its ranks
    ranks: tuple[int, ...]  # global ranks of the group
    parts: tuple[Part, ...]
    call_site: str

    @property
    def is_batch(self) -> bool:
        return self.parts[0].peer is not None

    def __str__(self) -> str:
        group = f"group {' '.join(map(str, self.ranks))}"
        return f"{' with '.join(map(str, self.parts))} ({self.call_site}, {group})"


class Wait(NamedTuple):
    handle: int  # of an operation


Event = Compute | Operation | Wait
Program = list[Event]


class Meeting(NamedTuple):
    """The place of a collective or message among those of the same ranks: where the calls of these ranks meet."""

    group: str
    ranks: tuple[int, ...]  # of a message, the sender and the receiver
    kind: str  # "collective", "message" or "creation" of a communicator
    number: int


Meetings = dict[int, list[Meeting]]  # of a rank's operations, by handle


def operations(program: Program) -> Iterator[Operation]:
    return (event for event in program if isinstance(event, Operation))


def meetings_of(rank: int, program: Program) -> Meetings:
    """Return where the parts of each operation of a rank meet those of other ranks, by handle."""
    count: Counter[Meeting] = Counter()
    meetings: Meetings = {}
    for operation in operations(program):
        meetings[operation.handle] = []
        for part in operation.parts:
            first = Meeting(operation.group, operation.ranks, "collective", 0)
            if part.peer is not None:
                ends = (rank, part.peer) if part.operation == "send" else (part.peer, rank)
                first = first._replace(ranks=ends, kind="message")
            meetings[operation.handle].append(first._replace(number=count[first]))
            count[first] += 1
    return meetings


def creation(operation: Operation) -> Meeting:
    """Return where the ranks meet that create the communicator of an operation."""
    return Meeting(operation.group, operation.ranks, "creation", 0)


def match(programs: Sequence[Program]) -> list[Meetings]:
    """Return `meetings_of` all ranks.

    Collectives meet by their place in the order of their group. So two equal ones in a different order are not found:
    the results would be wrong, but no rank would hang.

    Raises:
        UserError: two calls that meet differ, or a rank lacks a call, never waits for an operation, or uses a group
            first for a batch of messages.
    """
    meetings = [meetings_of(rank, program) for rank, program in enumerate(programs)]
    calls: dict[Meeting, dict[int, tuple[Part, Operation]]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        waits = {event.handle for event in program if isinstance(event, Wait)}
        created: set[str] = set()
        for operation in operations(program):
            if operation.handle not in waits:
                raise UserError(f"rank {rank} never waits for {operation}")
            if operation.group not in created and operation.is_batch:
                raise UserError(f"rank {rank} uses a group first for a batch of messages: {operation}")
            created.add(operation.group)
            for meeting, part in zip(meetings[rank][operation.handle], operation.parts, strict=True):
                calls[meeting][rank] = part, operation
    for meeting, met in calls.items():
        rank, (part, operation) = next(iter(met.items()))
        for other in meeting.ranks:
            if other not in met:
                raise UserError(f"rank {rank} calls {operation}, for which rank {other} has no call")
            their_part, theirs = met[other]
            # Both ends of a message have the same tensor; a collective also has the same purpose on all ranks.
            if part.tensor != their_part.tensor or (
                meeting.kind == "collective" and (part, operation.call_site) != (their_part, theirs.call_site)
            ):
                raise UserError(f"rank {rank} calls {operation}, but rank {other} calls {theirs}")
    return meetings


def most_in_flight(program: Program) -> int:
    """Return the largest number of groups that have operations at the same time which are not waited for yet."""
    groups: dict[int, str] = {}
    most = 0
    for event in program:
        if isinstance(event, Operation):
            groups[event.handle] = event.group
        elif isinstance(event, Wait):
            groups.pop(event.handle, None)
        most = max(most, len(set(groups.values())))
    return most
