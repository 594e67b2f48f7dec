"""A function that all ranks call, and whose errors all of them raise, and a comparison of its results."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from picotron.console import UserError

T = TypeVar("T")


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `function` on every rank of a group and gather the results on all of them, ordered by rank.

    Raises:
        UserError: on every rank if any rank raises it, because no rank may continue alone.
    """
    mine: tuple[T | None, tuple[str, ...]]
    try:
        mine = (function(), ())
    except UserError as error:
        mine = (None, error.problems)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for _, problems in everyone:
        if problems:
            raise UserError(*problems)
    return [result for result, _ in everyone]


def first_unequal(results: Sequence[object]) -> int:
    """Return the first rank whose result differs from that of rank 0; 0 if all are equal."""
    return next((rank for rank, each in enumerate(results) if each != results[0]), 0)
