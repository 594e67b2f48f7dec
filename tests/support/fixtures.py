"""Fixtures of all tests."""

import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch.distributed as dist

from conformance.worker_pool import CONTEXT, WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Distributed
from tests.support import checkpoints, warm_python
from tests.support.examples import save_model
from tests.support.oracle import config_data
from tests.support.samples import write_tokenizer
from workbench.explain.fake_group import fake_rank
from workbench.sweep.jobs import Job

hypothesis.settings.register_profile("no deadline", deadline=None)  # on a busy machine, a case may take long
hypothesis.settings.load_profile("no deadline")
may_start_processes = True


def refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if arguments[:1] == ("fc-list",):  # by which matplotlib finds fonts once per machine
        return
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and not may_start_processes:
        raise AssertionError("this test starts a process; mark it with @pytest.mark.processes")


sys.addaudithook(refuse_processes)


def pytest_collection_finish() -> None:
    """Run the garbage collector seldom, and never on what has been imported, which took a seventh of the time."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """Let this process be the only rank of a layout."""
    with fake_rank(0, Distributed()):
        yield


@pytest.fixture(autouse=True)
def _only_marked_tests_start_processes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let marked tests start processes. Their Python is warm, see `warm_python`, unless they are slow or cold."""
    global may_start_processes
    marks = {mark.name for mark in request.node.iter_markers()}
    may_start_processes = "processes" in marks
    is_warm = may_start_processes and not marks & {"slow", "cold"}
    monkeypatch.setattr(sys, "executable", warm_python.python() if is_warm else f"{sys.prefix}/bin/python")
    yield
    may_start_processes = True


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Processes whose fork server is a fork of warm Python, and has imported what most tests run in them."""
    CONTEXT.set_executable(warm_python.python())
    CONTEXT.set_forkserver_preload(["tests.fuzz.work"])
    return WorkerPool()


@pytest.fixture
def _end_process_group() -> Iterator[None]:
    """End the process group of a program that the test has run in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def _no_grid_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the grid of ranks that a fake process group leaves in this process."""
    monkeypatch.setattr(pgm, "process_group_manager", None)


@pytest.fixture(scope="session", autouse=True)
def _empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let caches begin empty, also those of the programs that tests start."""
    with mock.patch.dict(os.environ, HOME=str(tmp_path_factory.mktemp("home"))):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Folder with a tokenizer that has no chat template. The cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_tokenizer(tmp_path / "tokenizer")


@pytest.fixture(scope="session")
def run(pool: WorkerPool) -> checkpoints.Run:
    """Function that trains in the pool: `checkpoints.run` of a config and a model's config."""
    return functools.partial(checkpoints.run, pool)


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """Function that makes a job of one process and 20 steps; `training__seed=1` sets training.seed."""
    model, text = save_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(999)))

    def make(name: str, **changes: Any) -> Job:
        keys = {"model__name": model, "dataset__name": str(text), "logging__log_frequency": 1000}
        keys |= {"training__total_train_steps": 20, "training__micro_batch_size": 4}
        job = Job(tmp_path / "a sweep" / name, name)
        job.folder.mkdir(parents=True, exist_ok=True)
        job.config_file.write_text(json.dumps(config_data(**keys | changes)))
        return job

    return make
