"""The rules of `nccl_order`, in programs of a few calls on two ranks."""

from typing import Any

import pytest

from tests.support.nccl_calls import Compute, Event, Operation, Part, Wait
from tests.support.nccl_order import Deadlock, Play


def collective(handle: int, group: str = "a", operation: str = "all-gather", tensor: str = "float32 [4]") -> Operation:
    return Operation(handle, group, (0, 1), (Part(operation, tensor),), "a test")


def batch(handle: int, peer: int, *kinds: str, group: str = "a", tensor: str = "float32 [4]") -> Operation:
    return Operation(handle, group, (0, 1), tuple(Part(kind, tensor, peer) for kind in kinds), "a test")


def play(rank_0: list[Event], rank_1: list[Event], **options: Any) -> float:
    """Play two programs, after a collective in each of the groups a and b."""
    created: list[Event] = [collective(-1, "a"), Wait(-1), collective(-2, "b"), Wait(-2)]
    return Play([created + rank_0, created + rank_1], **options).run()


def test_ranks_that_both_send_first_hang() -> None:
    send, receive = [[batch(i, peer, kind) for peer in (1, 0)] for i, kind in enumerate(("send", "receive"))]
    waiting = [[send[rank], Wait(0), receive[rank], Wait(1)] for rank in (0, 1)]
    with pytest.raises(
        Deadlock, match=r"(?s)rank 0 waits in send of .* to rank 1 .*rank 1 waits in send of .* to rank 0"
    ):
        play(*waiting)
    starting = [[send[rank], receive[rank], Wait(0), Wait(1)] for rank in (0, 1)]  # a stream runs in order all the same
    with pytest.raises(Deadlock, match="rank 0 waits in send"):
        play(*starting)
    play(*[[batch(0, peer, "send", "receive"), Wait(0)] for peer in (1, 0)])
    play(starting[0], [receive[1], send[1], Wait(1), Wait(0)])


def test_groups_in_different_orders_hang_if_the_ranks_wait_in_between() -> None:
    a, b = collective(0, "a"), collective(1, "b")
    with pytest.raises(Deadlock, match=r"rank 0 waits in all-gather .* because\nrank 1 waits in all-gather"):
        play([a, Wait(0), b, Wait(1)], [b, Wait(1), a, Wait(0)])
    play([a, b, Wait(0), Wait(1)], [b, a, Wait(1), Wait(0)])
    with pytest.raises(Deadlock):
        play([a, b, Wait(0), Wait(1)], [b, a, Wait(1), Wait(0)], one_at_a_time=True)
    play([a, b, Wait(1), Wait(0)], [a, b, Wait(0), Wait(1)], one_at_a_time=True)


def test_groups_that_are_created_in_different_orders_hang() -> None:
    """Even if no rank waits for the collectives."""
    c, d = collective(0, "c"), collective(1, "d")
    with pytest.raises(Deadlock, match="rank 1 waits in all-gather"):
        play([c, d, Wait(0), Wait(1)], [d, c, Wait(0), Wait(1)])
    play([c, d, Wait(0), Wait(1)], [c, d, Wait(0), Wait(1)])


def test_time_passes_in_the_streams_and_between_them() -> None:
    costs = {"F": 3.0, "B": 1.0}

    def run(*programs: list[Event]) -> float:
        return play(
            *programs,
            cost=lambda event: costs[event.action] if isinstance(event, Compute) else 0.0,
            transfer=iter([0.0, 0.0, 2.0, 2.0]).__next__,
        )

    f, b, gather = Compute("F"), Compute("B"), collective(0)
    assert run([f, gather, Wait(0)], [b, gather, Wait(0)]) == 3 + 2
    assert run([gather, f, Wait(0)], [gather, b, Wait(0)]) == 3  # while the tensors travel, both compute
    assert run([b, gather, f, Wait(0)], [gather, Wait(0)]) == 1 + 3
    assert run([gather, collective(1), f, Wait(1), Wait(0)], [gather, collective(1), Wait(1), Wait(0)]) == 2 + 2
