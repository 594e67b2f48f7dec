"""Check of puzzle 9: query-key pairs of each rank, counted in the mask of causal attention."""

from types import ModuleType

import torch

from docs.programs.svg import causal
from puzzles.group import Group
from puzzles.report import Report, Score
from workbench.drawing.draw_svg import LINE, Svg

TOKENS = 6  # per chunk


def pairs(owners: list[int], cp: int) -> list[int]:
    """Return the query-key pairs of each rank."""
    per_query = torch.ones(2 * cp * TOKENS, 2 * cp * TOKENS).tril().sum(1)
    rank_of_query = torch.tensor(owners).repeat_interleave(TOKENS)
    return [int(per_query[rank_of_query == rank].sum()) for rank in range(cp)]


def check(learner: ModuleType, group: Group, report: Report) -> None:
    above = ""
    for cp in (2, 3, 8, 4):
        owners = [report.ask(learner, "owner", chunk, cp) for chunk in range(2 * cp)]
        for chunk, rank in enumerate(owners):
            is_rank = isinstance(rank, int) and 0 <= rank < cp
            group.require(is_rank, f"owner({chunk}, {cp}) is {rank!r}, expected a rank from 0 to {cp - 1}")
        report.picture = draw(owners, cp)
        for rank in range(cp):
            count = owners.count(rank)
            group.require(count == 2, f"cp = {cp}: rank {rank} has {count} chunks, expected 2; the owners are {owners}")
        work = pairs(owners, cp)
        report.score = Score(f"work of the busiest of {cp} ranks / mean:", max(work) * cp / sum(work), 1, 1, "{:.3f}")
        if not report.score.reached:
            above = above or f"the busiest of {cp} ranks has {max(work) * cp / sum(work):.3f} times the mean work"
    if above and report.score and report.score.reached:
        report.score = None
        group.require(False, f"all of 4 ranks have the same work, but {above}")


def draw(owners: list[int], cp: int) -> str:
    """Draw the blocks of attention in the colours of the ranks that compute them."""
    size, left = 360 / (2 * cp), 76
    picture = Svg(960, 400 + 2 * LINE)
    picture.text(
        0, 16, f"Attention of {2 * cp} chunks of queries (rows) to chunks of keys (columns), cp = {cp}", "title"
    )
    causal(picture, left, LINE + 8, size, owners)
    for rank, work in enumerate(pairs(owners, cp)):
        picture.text(left + 400, 50 + rank * LINE, f"rank {rank}: {work} query-key pairs")
    return str(picture)
