"""The clean process of which ranks are forks: it imports what they need, and computes nothing."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

from workbench.run.stop_signals import STOP_SIGNALS


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the process, unless there is one, and let it import modules. It ends with this one and its forks.

    It, and each fork when it begins, blocks stop signals, which a terminal or a scheduler sends to all processes.
    """
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:  # closed by a shell or a daemon: the next file would be taken for it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    multiprocessing.set_forkserver_preload(["workbench.run.preload"])
    resource_tracker.ensure_running()  # first, because it unblocks signals
    variables, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Modules are those of this process, and torch reads its number of threads when it is imported, as under torchrun.
    os.environ |= {
        "PICOTRON_PRELOAD": " ".join(modules),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(variables)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@atexit.register
def stop_fork_server() -> None:
    """Stop the process, and wait until it has ended."""
    with contextlib.suppress(ChildProcessError):  # of another process, of which this one is a fork
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
