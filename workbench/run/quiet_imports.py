"""Until `main` begins, Ctrl-C ends a program without a traceback: imports take seconds. Programs import this first."""

import os
import signal
import sys

if os.path.basename(sys.argv[0]) in ("train.py", "generate.py"):  # and not a program that imports one of them
    signal.signal(signal.SIGINT, signal.SIG_DFL)
