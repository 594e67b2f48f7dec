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

# Only the program itself, not a process that imports it: the fork server, which has the same arguments since Python
# 3.14, or a rank, if the fork server could not import the program.
program = Path(getattr(sys.modules["__main__"], "__file__", ""))
if program.name in ("train.py", "generate.py"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" not in os.environ:
        with contextlib.suppress(OSError):  # `run_ranks` tries again, and has a sentence
            start_fork_server([program.stem])
