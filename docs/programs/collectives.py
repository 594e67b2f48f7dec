"""Collectives on a few processes: what each rank has before and after, and how many bytes it sends.

    torchrun --nproc_per_node 4 -m docs.programs.collectives all_reduce   (without a name, bytes of all collectives)

In the functions, x is a rank's full tensor of n blocks, where n is the number of ranks, and a shard is one block.
Bytes are those that the operating system has sent for this process, so they can be counted on Linux only.
"""

import argparse
import contextlib
import functools
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.console import text_table
from workbench.run.all_ranks import run_on_all_ranks

NUMBERS = 2**20  # elements of the tensor whose bytes are counted: 4 MiB in float32


def send_recv(x: Tensor) -> Tensor | None:
    """Rank 0 sends, rank 1 receives, and the other ranks do nothing."""
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    elif dist.get_rank() == 1:
        dist.recv(x, src=0)
    return x if dist.get_rank() < 2 else None


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, src=0)
    return x


def scatter(x: Tensor) -> Tensor:
    shards = x.chunk(dist.get_world_size())
    received = torch.empty_like(shards[0])
    dist.scatter(received, list(shards) if dist.get_rank() == 0 else None, src=0)
    return received


def gather(shard: Tensor) -> Tensor | None:
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(shard, shards, dst=0)
    return torch.cat(shards) if shards else None


def all_gather(shard: Tensor) -> Tensor:
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard)
    return torch.cat(shards)


def reduce_scatter(x: Tensor) -> Tensor:
    shards = list(x.chunk(dist.get_world_size()))
    shard = torch.empty_like(shards[0])
    dist.reduce_scatter(shard, shards)
    return shard


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def all_to_all(x: Tensor) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def all_reduce_in_parts(x: Tensor) -> Tensor:
    """A reduce-scatter, here made of an all-to-all and a sum over the received blocks, and an all-gather."""
    shard = all_to_all(x).view(dist.get_world_size(), -1).sum(0)
    return all_gather(shard)


class Collective(NamedTuple):
    run: Callable[[Tensor], Tensor | None]
    before: str  # what ranks have: "full" tensors, a "shard" each, or a full tensor on "rank 0" only
    sent: str  # formula for the bytes that all ranks send together, in full tensors
    sent_by: Callable[[int], float]


COLLECTIVES = {
    "send_recv": Collective(send_recv, "rank 0", "1", lambda n: 1),
    "broadcast": Collective(broadcast, "rank 0", "n - 1", lambda n: n - 1),
    "scatter": Collective(scatter, "rank 0", "(n - 1)/n", lambda n: (n - 1) / n),
    "gather": Collective(gather, "shard", "(n - 1)/n", lambda n: (n - 1) / n),
    "all_gather": Collective(all_gather, "shard", "n - 1", lambda n: n - 1),
    "reduce_scatter": Collective(reduce_scatter, "full", "n - 1", lambda n: n - 1),
    "all_reduce": Collective(all_reduce, "full", "2 (n - 1)", lambda n: 2 * (n - 1)),
    "all_reduce_in_parts": Collective(all_reduce_in_parts, "full", "2 (n - 1)", lambda n: 2 * (n - 1)),
    "all_to_all": Collective(all_to_all, "full", "n - 1", lambda n: n - 1),
}


def before_and_after(name: str) -> tuple[list[int], list[int]]:
    """Run a collective on small tensors, in which block b of rank r is the number 10 r + b. Returns this rank's numbers
    before and after, as empty lists where it has none.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    collective, x = COLLECTIVES[name], 10 * rank + torch.arange(n)
    if collective.before == "shard":
        x = x[rank : rank + 1]
    before = x.tolist() if rank == 0 or collective.before != "rank 0" else []
    after = collective.run(x)
    return before, [] if after is None else after.tolist()


def bytes_sent() -> int:
    """Return how many bytes the TCP connections of this process have sent (in Linux's tcp_info: `tcpi_bytes_sent` minus
    `tcpi_bytes_retrans`, what was sent again).
    """
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed by now, or a socket of another kind
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                sent, sent_again = struct.unpack_from("QQ", information, 200)
                total += sent - sent_again
    return total


def full_tensors_sent(name: str) -> float:
    """Return the bytes that this rank sends in a collective, divided by the bytes of the full tensor."""
    n = dist.get_world_size()
    x = torch.ones(NUMBERS - NUMBERS % n)  # n blocks of equal size
    block = x[: len(x) // n] if COLLECTIVES[name].before == "shard" else x
    COLLECTIVES[name].run(block)  # opens connections
    dist.barrier()
    start = bytes_sent()
    COLLECTIVES[name].run(block)
    dist.barrier()
    return (bytes_sent() - start) / x.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=COLLECTIVES)
    chosen = parser.parse_args().name
    if "RANK" not in os.environ:
        parser.error(f"start this with: torchrun --nproc_per_node 4 -m docs.programs.collectives {chosen or ''}")
    if not (chosen or Path("/proc/self/fd").exists()):
        parser.error(f"only Linux counts the bytes of a connection; name one of {', '.join(COLLECTIVES)}")
    dist.init_process_group("gloo")
    ranks, n = range(dist.get_world_size()), dist.get_world_size()
    if chosen:
        rows = [[chosen, "before", "after"]]
        for rank, parts in zip(ranks, run_on_all_ranks(lambda: before_and_after(chosen)), strict=True):
            rows.append([f"rank {rank}", *(" ".join(f"{number:2}" for number in part) or "-" for part in parts)])
    else:
        rows = [["full tensors sent by", *(f"rank {rank}" for rank in ranks), "sum", "formula", ""]]
        for name, collective in COLLECTIVES.items():
            sent = run_on_all_ranks(functools.partial(full_tensors_sent, name))
            numbers = (f"{each:.2f}" for each in (*sent, sum(sent), collective.sent_by(n)))
            rows.append([name, *numbers, collective.sent])
    if dist.get_rank() == 0:
        print(text_table(rows, first_number=None if chosen else 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
