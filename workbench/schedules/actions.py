"""The vocabulary of pipeline schedules: actions, programs and the placement of stages. No torch and no times here.

A model is cut into stages and the batch of a step into micro-batches. An action is one computation on one micro-batch
in one stage: `2F0` is the forward of micro-batch 0 through stage 2. The kinds of actions are

    F   forward
    B   full backward
    I   first half of a split backward: the gradient of the stage's input, which the previous stage waits for
    W   second half: the gradients of the stage's weights, at any time after the I

A program is the list of one rank's actions; a schedule consists of the programs of all ranks. ("rank" means pp rank in
this package.) As text, with one line per rank, 1F1B for 3 ranks and 4 micro-batches is

    0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
    1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3
    2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
"""

import dataclasses
import functools
import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Placement = Literal["loop", "V"]


class Action(NamedTuple):
    """An action of one rank. Programs that are ready to run, see `checker`, have further kinds: the messages SEND_F,
    RECV_F, SEND_B and RECV_B, and R, which reduces a stage's gradients over dp and cp ranks and has no micro-batch.
    """

    kind: str
    stage: int
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + ("" if self.kind == "R" else str(self.micro_batch))

    @property
    def parts(self) -> tuple["Action", ...]:
        return (self,)

    @property
    def result(self) -> "Action":
        """The name of this action's result. I and B both compute the gradient of the input, whose name is that of B."""
        return Action("B", self.stage, self.micro_batch) if self.kind == "I" else self


class Overlapped(NamedTuple):
    """A forward and a backward of two micro-batches that overlap: while one computes, the other communicates."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)


AnyAction = Action | Overlapped

_ACTION = re.compile(r"([0-9]{1,6})(?:R|((?:SEND_|RECV_)?[FB]|I|W)([0-9]{1,6}))")
_OVERLAPPED = re.compile(r"\(([0-9]+F[0-9]+);([0-9]+B[0-9]+)\)(?:OVERLAP_F_B)?")  # torch appends OVERLAP_F_B


def parse_action(text: str) -> AnyAction:
    """Parse an action as it is printed here or by torch.distributed.pipelining.

    Raises:
        ValueError: the text is not an action.
    """
    if pair := _OVERLAPPED.fullmatch(text):
        return Overlapped(*(part for half in pair.groups() for part in parse_action(half).parts))
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action")
    stage, kind, micro_batch = match.groups()
    return Action(kind or "R", int(stage), int(micro_batch or 0))


class Program(list[AnyAction]):
    """The actions of one rank. Each method appends an action of the stage's next micro-batch, which it numbers.

    After a stage's last micro-batch, its methods append nothing. So a schedule that is written for many micro-batches
    also works for a few: an action waits only for actions of its own micro-batch, so dropping all actions of one
    micro-batch cannot block the others.
    """

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self._count: Counter[tuple[str, int]] = Counter()
        self._split: deque[Action] = deque()  # the I whose W has not been appended yet

    def _next(self, kind: str, stage: int) -> list[Action]:
        half = "F" if kind == "F" else "B"  # B and I share one count
        action = Action(kind, stage, self._count[half, stage])
        self._count[half, stage] += 1
        return [action] if action.micro_batch < self.micro_batches else []

    def forward(self, stage: int) -> None:
        self.extend(self._next("F", stage))

    def backward(self, stage: int) -> None:
        self.extend(self._next("B", stage))

    def overlapped(self, forward: int, backward: int) -> None:
        """Append the forward of one stage and the backward of another as one action."""
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
        """Append the W of the oldest I without a W, if more than `keep` I actions have none yet."""
        if len(self._split) > keep:
            self.append(self._split.popleft()._replace(kind="W"))

    def all_backward_weights(self) -> None:
        while self._split:
            self.backward_weight()


def rank_of(stage: int, pp: int, placement: Placement) -> int:
    """Return the rank that holds a stage. With 4 ranks, stages 0 to 7 are on ranks 0 1 2 3 0 1 2 3 in a loop, and on
    ranks 0 1 2 3 3 2 1 0 in a V.
    """
    chunk, place = divmod(stage, pp)
    return pp - 1 - place if placement == "V" and chunk % 2 else place


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of all ranks of a pipeline in one step.

    Args:
        programs: the program of each rank, without messages and reductions.
        micro_batches: number of micro-batches.
        chunks: number of stages per rank.
        placement: order of the stages on the ranks, see `rank_of`.
        forward_only: whether the step is an evaluation.
    """

    programs: Sequence[Sequence[AnyAction]]
    micro_batches: int
    chunks: int = 1
    placement: Placement = "loop"
    forward_only: bool = False

    @functools.cached_property
    def pp(self) -> int:
        return len(self.programs)

    @functools.cached_property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether some backwards are two actions, I and W."""
        return any(part.kind == "I" for program in self.programs for action in program for part in action.parts)

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.pp, self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, chunk 0 first."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def target(self, action: Action) -> int | None:
        """Return the stage that needs an action's result, or None if none does."""
        stage = action.stage + (1 if action.kind == "F" else -1)
        return stage if action.kind != "W" and 0 <= stage < self.num_stages else None

    def source(self, action: Action) -> Action | None:
        """Return the result of another stage that an action needs, see `Action.result`, or None if it needs none."""
        if action.kind == "F" and action.stage > 0:
            return Action("F", action.stage - 1, action.micro_batch)
        if action.kind in ("B", "I") and action.stage < self.num_stages - 1:
            return Action("B", action.stage + 1, action.micro_batch)
        return None
