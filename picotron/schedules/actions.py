"""The vocabulary of pipeline schedules: actions, programs, and on which rank a stage is. No torch, no clock.

A model is cut into stages and the batch of a step into micro-batches. An action is one piece of work on one of each:
`2F0` is the forward of micro-batch 0 through stage 2. There are

    F   forward
    B   backward, all of it
    I   the half of a backward that other stages wait for: the gradient of the stage's input
    W   the other half: the gradients of the stage's weights, any time after the I

A program is the list of one rank's actions; a schedule is the programs of all ranks. The same as text, one line per
rank, here 1F1B for 3 ranks and 4 micro-batches:

    0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
    1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3
    2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
"""

import dataclasses
import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Placement = Literal["loop", "V"]


class Action(NamedTuple):
    """One piece of work. Programs that are ready to run, see `checker`, have more kinds: SEND_F, RECV_F, SEND_B and
    RECV_B, the messages, and R, which reduces a stage's gradients over data-parallel ranks and has no micro-batch.
    """

    kind: str
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + ("" if self.kind == "R" else str(self.microbatch))

    @property
    def parts(self) -> tuple["Action", ...]:
        return (self,)

    @property
    def result(self) -> "Action":
        """What others ask for: the stage before this one takes what an I gives it as it takes what a B does."""
        return self._replace(kind="B") if self.kind == "I" else self


class Overlapped(NamedTuple):
    """A forward and a backward of two micro-batches at the same time: while one computes, the other communicates."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)


AnyAction = Action | Overlapped

_ACTION = re.compile(r"([0-9]{1,6})(?:R|((?:SEND_|RECV_)?[FB]|I|W)([0-9]{1,6}))")
_OVERLAPPED = re.compile(r"\(([0-9]+F[0-9]+);([0-9]+B[0-9]+)\)(?:OVERLAP_F_B)?")  # what torch puts behind it


def parse_action(text: str) -> AnyAction:
    """The action that prints as `text`, here or in torch.distributed.pipelining. ValueError if there is none."""
    if pair := _OVERLAPPED.fullmatch(text):
        return Overlapped(*(part for half in pair.groups() for part in parse_action(half).parts))
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not an action")
    stage, kind, microbatch = found.groups()
    return Action(kind or "R", int(stage), int(microbatch or 0))


class Program(list[AnyAction]):
    """One rank's actions. Each method appends an action of the stage's next micro-batch, so that schedules never count.

    Once a stage has had all its micro-batches, nothing is appended. So a schedule that is made for many micro-batches
    also works for a few: an action waits only for others of its own micro-batch, so leaving out all actions of one
    does not hold up the rest.
    """

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self.microbatches = microbatches
        self._count: Counter[tuple[str, int]] = Counter()
        self._split: deque[Action] = deque()  # the I whose W is still to come

    def _next(self, kind: str, stage: int) -> list[Action]:
        half = "F" if kind == "F" else "B"  # B and I are numbered together
        action = Action(kind, stage, self._count[half, stage])
        self._count[half, stage] += 1
        return [action] if action.microbatch < self.microbatches else []

    def forward(self, stage: int) -> None:
        self.extend(self._next("F", stage))

    def backward(self, stage: int) -> None:
        self.extend(self._next("B", stage))

    def overlapped(self, forward: int, backward: int) -> None:
        """Forward of one stage and backward of another, in one action."""
        actions = self._next("F", forward) + self._next("B", backward)
        if len(actions) == 2:
            self.append(Overlapped(*actions))
        else:
            self.extend(actions)

    def backward_input(self, stage: int) -> None:
        actions = self._next("I", stage)
        self.extend(actions)
        self._split.extend(actions)

    def backward_weight(self, keep: int = 0) -> None:
        """The W of the oldest I, if there are more than `keep` of them whose W is still to come."""
        if len(self._split) > keep:
            self.append(self._split.popleft()._replace(kind="W"))

    def all_backward_weights(self) -> None:
        while self._split:
            self.backward_weight()


def rank_of(stage: int, pp: int, placement: Placement) -> int:
    """The rank that holds a stage. A loop goes from the last rank to the first: with 4 ranks, 0 1 2 3 0 1 2 3. A V
    turns round at the ends: 0 1 2 3 3 2 1 0.
    """
    chunk, place = divmod(stage, pp)
    return pp - 1 - place if placement == "V" and chunk % 2 else place


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What all ranks of a pipeline do in one step.

    Args:
        programs: by rank. They have neither messages nor reductions.
        chunks: how many stages each rank has.
        placement: which stages.
        forward_only: for an evaluation.
    """

    programs: Sequence[Sequence[AnyAction]]
    microbatches: int
    chunks: int = 1
    placement: Placement = "loop"
    forward_only: bool = False

    @property
    def pp(self) -> int:
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.pp, self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """From chunk 0 on."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def source(self, action: Action) -> Action | None:
        """Of another stage, the `Action.result` that an F, B or I needs; None if it needs none, as W."""
        if action.kind == "F" and action.stage > 0:
            return Action("F", action.stage - 1, action.microbatch)
        if action.kind in ("B", "I") and action.stage < self.num_stages - 1:
            return Action("B", action.stage + 1, action.microbatch)
        return None
