"""What a program does before it imports for seconds, for which it imports this first.

The fork server begins to import, too, at the same time. Until `main` begins, Ctrl-C ends the program without a
traceback.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from workbench.run.fork_server import start_fork_server

# Not in a program that imports one of them, such as the fork server, whose arguments are those of this one since 3.14.
program = Path(getattr(sys.modules["__main__"], "__file__", ""))
if program.name in ("train.py", "generate.py"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" not in os.environ:
        with contextlib.suppress(OSError):  # `run_ranks` tries again, and has a sentence
            start_fork_server([program.stem])
