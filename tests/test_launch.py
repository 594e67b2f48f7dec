"""Start of a process: what it asks the C library for."""

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys, torch
from picotron.launch import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20) for _ in range(25)]  # 100 MiB
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """Without the setting, the third step takes 100 MiB from the kernel again, page by page."""
    faults = [
        int(subprocess.run([sys.executable, "-c", COUNT_FAULTS, word], capture_output=True, check=True).stdout)
        for word in ("default", "keep")
    ]
    assert faults[1] < faults[0] / 5
