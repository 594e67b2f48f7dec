"""The ranks of one machine without torchrun: forks of a process that has imported everything and checked the config."""

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from picotron.run.launch import STOP_SIGNALS, exit_on_error, set_log_level

GRACE_SECONDS = 30.0  # for the other ranks, after one has ended with a stop signal; torchrun waits as long
POLL_SECONDS = 0.05


def run_ranks(count: int, function: Callable[[], None]) -> None:
    """Call a function on `count` ranks, which are forks of this process. With one rank, or if torchrun has started this
    process, call it here.

    A stop signal is passed on to all ranks. If a rank fails, the others are killed, so that its error is the last thing
    on the screen. This process must not have used a GPU, nor be in a process group.

    Raises:
        SystemExit: with the status of the first rank whose status is not 0.
    """
    if "RANK" in os.environ or count == 1:
        return function()
    sys.stdout.flush()
    sys.stderr.flush()
    listener, ranks = socket.create_server(("127.0.0.1", 0), backlog=count), dict[int, int]()
    port = listener.getsockname()[1]
    for rank in range(count):
        if (process := os.fork()) == 0:
            listener.close()
            _run_rank(rank, count, port, function)
        ranks[process] = rank

    def forward(number: int, _: Any) -> None:
        for process in ranks:
            os.kill(process, number)

    handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        status = _wait(ranks)
        del store
    finally:
        forward(signal.SIGKILL, None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if status:
        sys.exit(status)


def _run_rank(rank: int, count: int, port: int, function: Callable[[], None]) -> NoReturn:
    """Call a function in a fork, with the environment variables that torchrun sets."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forks"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    set_log_level()
    status = 1
    try:
        exit_on_error(function)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # and not the programs that called `run_ranks`


def _wait(ranks: dict[int, int]) -> int:
    """Wait until the processes of all ranks have ended. Returns the first status that is not 0, or 0."""
    status, end = 0, math.inf
    while ranks:
        for process in list(ranks):
            ended, result = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            rank, code = ranks.pop(process), os.waitstatus_to_exitcode(result)
            if code and not status:
                status = code if code > 0 else 128 - code
                end = time.monotonic() + (GRACE_SECONDS if code > 128 else 0)
                if code < 0:
                    name = signal.Signals(-code).name
                    hint = ", which the system does if memory runs out" if name == "SIGKILL" else ""
                    print(f"\n[rank {rank}] error: the process was ended by {name}{hint}", file=sys.stderr, flush=True)
        if time.monotonic() >= end:
            for process in ranks:
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return status
