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

if (program := Path(sys.argv[0])).name in ("train.py", "generate.py"):  # and not a program that imports one of them
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" not in os.environ:
        with contextlib.suppress(OSError):  # `run_ranks` tries again, and has a sentence
            start_fork_server([program.stem])
