"""The ranks of one machine without torchrun: processes that a program starts when it has checked the config."""

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from picotron.console import UserError
from workbench.run.launch import STOP_SIGNALS, exit_on_error, logger, set_log_level, set_up_logging
from workbench.run.start_method import START_METHOD

GRACE_SECONDS = 30.0  # for the other ranks, after one has ended with a stop signal; torchrun waits as long
POLL_SECONDS = 0.05


def run_ranks(count: int, function: Callable[[], None]) -> None:
    """Call a function on `count` ranks, which are new processes: on Linux, forks of this one. With one rank, or if
    torchrun has started this process, call it here.

    A stop signal is passed on to all ranks. If a rank fails, the others are killed, so that its error is the last thing
    on the screen. This process must not have used a GPU, nor be in a process group.

    Raises:
        SystemExit: with the status of the first rank whose status is not 0.
        UserError: ranks are not forks, see START_METHOD, and cannot import the function.
    """
    if "RANK" in os.environ or count == 1:
        return function()
    if START_METHOD != "fork":
        check_importable(function)
    listener, context = socket.create_server(("127.0.0.1", 0), backlog=count), multiprocessing.get_context(START_METHOD)
    ranks: list[Any] = []
    for rank in range(count):
        arguments = rank, count, listener, bool(logger.handlers), function
        ranks.append(context.Process(target=_run_rank, args=arguments))  # type: ignore[attr-defined]
        ranks[-1].start()

    def forward(number: int, _: Any) -> None:
        for process in ranks:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)

    handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    port = listener.getsockname()[1]
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


def check_importable(function: Callable[[], None]) -> None:
    """Raise a UserError if a new process cannot import a function."""
    try:
        in_file = b"__main__" not in pickle.dumps(function) or hasattr(sys.modules["__main__"], "__file__")
    except (AttributeError, TypeError, pickle.PicklingError):
        in_file = False
    if not in_file:
        raise UserError(
            f"on this system, each rank is a new process, which cannot import {function}; define the function at the "
            f"top level of a file, and give it arguments with functools.partial"
        )


def _run_rank(rank: int, count: int, listener: socket.socket, log: bool, function: Callable[[], None]) -> NoReturn:
    """Call a function in a new process, with the environment variables that torchrun sets."""
    port = listener.getsockname()[1]
    listener.close()  # so that nobody can connect once the process that serves the port is gone
    sys.stdin = sys.stdin and os.fdopen(0, closefd=False)  # multiprocessing has closed it, and a user may type
    if log and not logger.handlers:  # not a fork
        set_up_logging()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "run_ranks"}
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


def _wait(ranks: list[Any]) -> int:
    """Wait until all processes have ended. Returns the first status that is not 0, or 0."""
    status, end, running = 0, math.inf, dict(enumerate(ranks))
    while running:
        for rank, process in list(running.items()):
            if (code := process.exitcode) is None:
                continue
            del running[rank]
            if code and not status:
                status = code if code > 0 else 128 - code
                end = time.monotonic() + (GRACE_SECONDS if code > 128 else 0)
                if code < 0:
                    name = signal.Signals(-code).name
                    hint = ", which the system does if memory runs out" if name == "SIGKILL" else ""
                    print(f"\n[rank {rank}] error: the process was ended by {name}{hint}", file=sys.stderr, flush=True)
        if time.monotonic() >= end:
            for process in running.values():
                process.kill()
        time.sleep(POLL_SECONDS)
    return status
