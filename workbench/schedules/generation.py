"""The schedule of generation: groups of prompts rotate through the stages of a pipeline. No torch.

The next token of a sequence depends on the token before, which the last stage draws. So a single group of sequences
keeps one stage busy at a time. With as many groups as ranks, each rank computes a different group in every tick, the
time of one stage. For 3 ranks, `2F4` is group 1 (4 modulo 3) in its second round (4 divided by 3) on stage 2:

    tick     0   1   2   3   4   5   6   7
    pp 0    0F0 0F1 0F2 0F3 0F4 0F5
    pp 1        1F0 1F1 1F2 1F3 1F4 1F5
    pp 2            2F0 2F1 2F2 2F3 2F4 2F5

The first round of a group is the prefill, which reads the prompts; each later one is the decode of one token.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from picotron.console import UserError
from workbench.schedules.actions import Action, Placement, Schedule
from workbench.schedules.schedules import MAX_FORWARDS


@dataclasses.dataclass(frozen=True)
class GenerationSchedule(Schedule):
    """A schedule whose micro-batch number is round x groups + group.

    Idle: (p - 1) / (rounds v groups + p - 1) in a loop with at least p groups; about 1 - groups / p with fewer.

    Args:
        groups: number of groups of prompts.
    """

    groups: int = 1

    def source(self, action: Action) -> Action | None:
        """Return the result that an action needs: in later rounds, the first stage needs the last stage's tokens."""
        if action.stage == 0 and action.micro_batch >= self.groups:
            return Action("F", self.num_stages - 1, action.micro_batch - self.groups)
        return super().source(action)

    def target(self, action: Action) -> int:
        """Return the stage that needs an action's result: after the last stage, the first one."""
        return (action.stage + 1) % self.num_stages

    def ticks(self, rank: int) -> Iterator[Action | None]:
        """Yield what a rank computes in each tick, or None, without end. With as many groups as ranks, an action needs
        the result of the tick before.

        In a loop, a group starts in every tick. In a V, it starts in every other one: a rank's stages on the way down
        have the even ticks, counted from its first one, and those on the way up the odd ones.
        """
        legs = 2 if self.placement == "V" and self.chunks > 1 else 1
        width = max(self.pp, self.groups)  # more groups than ranks wait for the first rank
        period = self.chunks * width  # ticks of a round
        starts = {s: s % (legs * self.pp) + s // (legs * self.pp) * legs * width for s in self.stages_of(rank)}
        for tick in itertools.count():
            found = None
            for stage, start in starts.items():
                number, offset = divmod(tick - start, period)
                group, between = divmod(offset, legs)
                if number >= 0 and between == 0 and group < self.groups:
                    found = Action("F", stage, number * self.groups + group)
            yield found


def generation(pp: int, groups: int, rounds: int, chunks: int, placement: Placement = "loop") -> GenerationSchedule:
    """Build the schedule of generation.

    Args:
        groups: number of groups of prompts.
        rounds: number of tokens to generate for each prompt.

    Raises:
        UserError: it does not work with these numbers.
    """
    count = chunks * groups * rounds  # forwards of a rank
    if min(pp, groups, rounds, chunks) < 1 or pp * count > MAX_FORWARDS:
        raise UserError(
            f"pp={pp}, groups={groups}, rounds={rounds} and chunks={chunks} must each be at least 1, and their product at "
            f"most {MAX_FORWARDS:,}"
        )
    if placement == "V" and chunks % 2 and chunks > 1:
        raise UserError(
            f"generation with stages placed in a V needs an even number of chunks, so that the last stage is on the rank "
            f"of the first one, not {chunks}; use another pp_engine"
        )
    schedule = GenerationSchedule([()] * pp, groups * rounds, chunks, placement, forward_only=True, groups=groups)
    programs = []
    for rank in range(pp):
        actions = (
            action for action in schedule.ticks(rank) if action is not None and action.micro_batch < groups * rounds
        )
        programs.append(list(itertools.islice(actions, count)))
    return dataclasses.replace(schedule, programs=programs)
