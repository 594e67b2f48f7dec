"""The ranks of one machine without torchrun: processes that a program starts when it has checked the config."""

import atexit
import contextlib
import gc
import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from picotron.console import UserError
from workbench.console import first_line, print_line
from workbench.run.fork_server import start_fork_server
from workbench.run.launch import exit_on_error, forget_groups, is_launched, logger, set_log_level, set_up_logging
from workbench.run.run_folder import CLAIM
from workbench.run.stop_signals import STOP_SIGNALS

GRACE_SECONDS = 30.0  # for the other ranks, after one has ended with a stop signal; torchrun waits as long
POLL_SECONDS = 0.05
ENDINGS = {  # of processes that a signal has ended
    "SIGKILL": ", which the system does if memory runs out",
    "SIGABRT": ", which NCCL does if a collective fails or other ranks do not come; its lines above say which",
}
CONNECT_TIME = timedelta(seconds=10)


def run_ranks(count: int, function: Callable[[], None]) -> None:
    """Call a function on `count` ranks, which are new processes: forks of a clean one, so that this one may have
    computed, or used a GPU. With one rank, or if torchrun has started this process, call it here.

    If the file of the program has a line `if __name__ == "__main__":`, below which it calls this, each rank imports it,
    as with `multiprocessing`. Else, as from a notebook, ranks get the function with the variables that it names. Ranks
    have this process's environment variables, folder, and torch's seed and default dtype.

    A stop signal is passed on to all ranks. If a rank fails, the others are killed, so that its error is the last thing
    on the screen. If this process is killed, the ranks receive SIGTERM.

    Raises:
        SystemExit: with the status of the first rank whose status is not 0.
        UserError: the ranks cannot be started.
    """
    if is_launched() or count == 1:
        try:
            return function()
        finally:  # the program may go on, and have further runs
            forget_groups()
            CLAIM.close()
    ranks: list[Any] = []
    handlers: dict[int, Any] = {}
    stops: list[int] = []
    program = sys.modules["__main__"]
    try:
        if threading.current_thread() is threading.main_thread():  # others may not handle signals
            for number in (*STOP_SIGNALS, signal.SIGUSR2):  # which prints stacks
                handlers[number] = signal.signal(number, lambda number, _: stops.append(number))
        start_fork_server([name for name in sys.modules if name.startswith(("picotron.", "workbench."))])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=CONNECT_TIME)
        variables = {
            "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
            "TORCHELASTIC_RUN_ID": "run_ranks", "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        payload = _payload(function, program)
        if not _has_guard(program):
            sys.modules["__main__"] = ModuleType("__main__")  # so that ranks do not import it
        context = multiprocessing.get_context("forkserver")
        for rank in range(count):
            own = {key: str(value) for key, value in (variables | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            arguments = os.environ | own, bool(logger.handlers), payload
            process = context.Process(target=_run_rank, args=arguments, name=f"rank {rank}")
            process.start()
            ranks.append(process)
        sys.modules["__main__"] = program
        status = _wait(ranks, stops)
    except (OSError, EOFError, dist.DistError) as error:
        raise UserError(
            f"{count} ranks cannot be started: {first_line(error)}; see the limits of `ulimit -a`, whether there is a "
            f"loopback interface, and whether TMPDIR has at most 70 characters, because sockets there cannot have long paths"
        ) from error
    finally:
        sys.modules["__main__"] = program
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        for stop, handler in handlers.items():
            signal.signal(stop, handler or signal.SIG_DFL)
    if status:
        sys.exit(status)


def _payload(function: Callable[[], None], program: ModuleType) -> bytes:
    call = function, torch.get_default_dtype(), torch.get_rng_state()
    try:
        if _has_guard(program):
            with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):  # a lambda, or a local function
                return pickle.dumps(call)
        import cloudpickle  # which train.py does not need

        return cloudpickle.dumps(call)
    except (TypeError, pickle.PicklingError) as error:
        raise UserError(
            f"{function} cannot be sent to the ranks ({first_line(error)}); let it make what it needs itself"
        ) from error


def _has_guard(program: ModuleType) -> bool:
    path = Path(getattr(program, "__file__", ""))  # since Python 3.13, a prompt has one, too
    return not hasattr(sys, "ps1") and path.is_file() and "\nif __name__" in path.read_text(errors="replace")


def _run_rank(environment: dict[str, str], log: bool, payload: bytes) -> None:
    """Call a function in a new process, and end as a program does, which a fork does not by itself."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    multiprocessing.set_start_method(None, force=True)  # the default again, as for any program
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has closed it, and a user may type
    set_up_logging() if log else set_log_level()

    def main() -> None:
        function, dtype, seed = pickle.loads(payload)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(seed)
        torch.cuda.manual_seed_all(torch.initial_seed())  # when CUDA starts
        function()

    atexit.register(_flush_files)
    try:
        exit_on_error(main)
    finally:
        atexit._run_exitfuncs()


def _flush_files() -> None:
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(OSError, ValueError):  # of a full disk, or of a closed file
                each.flush()


def _wait(ranks: list[Any], stops: list[int]) -> int:
    """Wait until all processes have ended, and pass on the signals in `stops`. Returns the first status but 0, or 0."""
    status, end, running = 0, math.inf, {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), POLL_SECONDS):
            rank = running.pop(sentinel)
            code = ranks[rank].exitcode
            if code and not status:
                status = code if code > 0 else 128 - code
                end = time.monotonic() + (GRACE_SECONDS if code > 128 else 0)
                if code < 0 and -code not in STOP_SIGNALS:
                    name = signal.Signals(-code).name
                    print_line(
                        f"\n[rank {rank}] error: the process was ended by {name}{ENDINGS.get(name, '')}",
                        file=sys.stderr,
                    )
        while stops:
            number = stops.pop()
            for rank in running.values():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(ranks[rank].pid, number)
    return status
