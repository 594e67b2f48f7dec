"""The way in which a process starts others that go on in its program: chosen here only."""

import sys

# A fork starts in milliseconds, because it need not import torch. On macOS, libraries of the system may crash after a
# fork, so a process there is a new one (spawn), which imports what it is to call.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
