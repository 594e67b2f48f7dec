"""A step of a schedule under NCCL's rules of order, see `nccl_order`: an early receive can block later messages.

The ranks make the calls of `Executor`, and of torch.distributed.pipelining: a SEND or RECV starts its message, and a
computation waits for the messages that bring its inputs.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, get_args

from picotron.console import UserError
from workbench.schedules.actions import Action, AnyAction, Schedule, parse_action
from workbench.schedules.checker import MAX_SENDS_IN_FLIGHT, add_communication
from workbench.schedules.nccl_calls import Compute, Event, Operation, Part, Program, Wait
from workbench.schedules.nccl_order import Play
from workbench.schedules.simulate import Costs, Span, Timeline, computes

# The communicators of the messages: a single one, one for each pair of ranks, or, as in `Executor`, one for messages to
# higher ranks and one for messages to lower ranks.
Communicators = Literal["directions", "one", "pairs"]
COMMUNICATORS: tuple[Communicators, ...] = get_args(Communicators)


def simulate_nccl(
    schedule: Schedule,
    costs: Costs,
    programs: Sequence[Sequence[AnyAction]] = (),
    communicators: Communicators = "directions",
) -> Timeline:
    """Compute when each action of a step runs, and each message that waits or takes time. Reductions are left out.

    Args:
        programs: the programs of the schedule with messages in any order; by default those of `add_communication`.
            Their ranks wait for their sends only at the end of the step, as in torch.distributed.pipelining.

    Raises:
        UserError: the ranks wait for each other, or messages are missing or do not match.
    """
    sends = max(map(len, programs)) if programs else MAX_SENDS_IN_FLIGHT
    programs = programs or add_communication(schedule)
    calls = [calls_of(schedule, rank, program, communicators, sends) for rank, program in enumerate(programs)]

    def cost(event: Event) -> float:
        return costs.of(parse_action(event.action)) if isinstance(event, Compute) else 0.0

    play = Play(calls, cost, message=costs.p2p + costs.transfer)
    play.run()
    spans = [
        [
            Span(parse_action(event.action if isinstance(event, Compute) else event.call_site), start, end)
            for event, start, end in rank.spans
            if isinstance(event, Compute) or (event.is_batch and end > start)
        ]
        for rank in play.ranks
    ]
    return Timeline([sorted(each, key=lambda span: span.start) for each in spans])


def calls_of(
    schedule: Schedule, rank: int, program: Sequence[AnyAction], communicators: Communicators, sends: int
) -> Program:
    """Return the calls of a rank, which has at most `sends` messages to another rank in flight.

    Raises:
        UserError: a message has no other end, or an action comes before what it needs.
    """
    calls: Program = []
    results: dict[Action | None, list[int]] = {None: []}  # what the rank has, with the handle to wait for, if any
    sent: dict[int, deque[int]] = defaultdict(deque)

    def group_of(sender: int, receiver: int) -> tuple[str, tuple[int, ...]]:
        pair = min(sender, receiver), max(sender, receiver)
        name = {"one": "all", "pairs": str(pair), "directions": "down" if sender < receiver else "up"}[communicators]
        return name, pair if communicators == "pairs" else tuple(range(schedule.pp))

    def start(group: tuple[str, tuple[int, ...]], part: Part, name: str = "") -> int:
        calls.append(Operation(len(calls), *group, (part,), name))
        return len(calls) - 1

    def wait_for(result: Action | None, action: AnyAction) -> None:
        if result not in results:
            raise UserError(f"pp rank {rank} has {action} before it has the result of {result}")
        calls.extend(map(Wait, results[result]))

    for group in sorted({group_of(*ends) for ends in itertools.permutations(range(schedule.pp), 2)}):
        if rank in group[1]:
            calls.append(Wait(start(group, Part("first communication", ""))))
    for action in program:
        if computes(action):
            for part in action.parts:
                wait_for(schedule.source(part), action)
                results[part.result] = []
            calls.append(Compute(str(action)))
            continue
        (part,) = action.parts
        if part.kind == "R":
            continue
        sending, own = part.kind.startswith("SEND"), part._replace(kind=part.kind[-1])
        result = own if sending else schedule.source(own)
        stage = schedule.target(own) if sending else result and result.stage
        if result is None or stage is None:
            raise UserError(f"pp rank {rank} has {action}, but no stage is at the other end of this message")
        other = schedule.rank_of(stage)
        if sending:
            wait_for(result, action)
            while len(sent[other]) >= sends:
                calls.append(Wait(sent[other].popleft()))
            sent[other].append(start(group_of(rank, other), Part("send", str(result), other), str(action)))
        else:
            results[result] = [start(group_of(other, rank), Part("receive", str(result), other), str(action))]
    return calls + [Wait(handle) for handles in sent.values() for handle in handles]
