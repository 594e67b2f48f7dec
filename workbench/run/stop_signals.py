"""Signals that stop a run, or a sweep on this machine. No torch here."""

import os
import signal
from typing import Any

# By process: what has started it. This comes before the imports that take long, during which a launcher may be killed.
LAUNCHERS = {os.getpid(): os.getppid()}

STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


class StopSignals:
    """Handler of SIGTERM, SIGINT (Ctrl-C), SIGHUP (a closed terminal) and SIGUSR1 (which Slurm can send before a time
    limit). It only notes the signal: a run ends after the current step, and a sweep on this machine stops its job.

    A second signal has no effect: on Ctrl-C, every process gets one from the terminal and one from its launcher.
    """

    received = 0  # the signal's number

    def __init__(self) -> None:
        StopSignals.received, self.handlers = 0, dict[int, Any]()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self.handlers[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Give the signals back to the program, which may go on after its run."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    @staticmethod
    def _note(number: int, _: Any) -> None:
        StopSignals.received = number
