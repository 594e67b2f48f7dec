import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

from tests.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder for programs that the tests start: their caches begin empty."""
    return tmp_path_factory.mktemp("home")
