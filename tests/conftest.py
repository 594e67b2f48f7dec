import os
import shlex
import sys
from typing import Any

import pytest

from tests.support import warm_python

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
# tests of which a worker gets one at a time, instead of all of a file
SPREAD = ("test_all_commands_print_the_output_on_the_page", "test_random_cases_equal_transformers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, which `make check` leaves out. Skip those for Linux elsewhere."""
    for item in items:
        if item.get_closest_marker("linux") and sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="needs what only Linux has"))
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each file to one worker, but pages with slow commands and groups of random cases
    to any worker.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_spread = any(f"::{name}[" in nodeid for name in SPREAD)
            return nodeid if is_spread else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, but not in the process that only hands out the tests: they import torch, for 5 s. It starts
    the process of which all others are forks.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.fixtures")
    elif "not processes" not in config.getoption("markexpr"):
        os.environ[warm_python.SHARED] = python = warm_python.python()
        config.option.tx = [f"popen//python={shlex.quote(python)}"] * len(config.option.tx)
