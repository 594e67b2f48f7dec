"""Processes that read data for a rank, and the signals that they leave to it."""

import os
import signal
import threading
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def ignore_stop_signals(_: int) -> None:
    """Initialise a data-loader worker. Terminals and schedulers signal workers, too, but the run still needs them to
    finish its step. A worker ends with its parent, even while it waits for somebody to read its results.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
