"""What the fork server does before it forks: it imports modules, and ends if the process that has started it does."""

import atexit
import gc
import importlib
import os
import signal

parent, server = os.getppid(), os.getpid()


def end_with_parent(*_: object) -> None:
    if os.getppid() != parent:
        os._exit(1)


@atexit.register
def end_at_once() -> None:
    """Skip the deletion of what has been imported, except in a fork, which has its own end."""
    if os.getpid() == server:
        os._exit(0)


signal.signal(signal.SIGALRM, end_with_parent)
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
for name in os.environ.get("PICOTRON_PRELOAD", "").split():
    importlib.import_module(name)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
gc.freeze()  # the garbage collector would write to memory that the forks share
