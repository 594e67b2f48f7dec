"""Each function on the way through the trainer runs in a step."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from conformance.oracle import make_config, random_rows, tiny_llama
from conformance.training import CPU, pipeline_of, wrapped
from conformance.worker_pool import WorkerPool
from docs.programs.reading_path import PATH
from picotron.data.loader import MicroBatchDataLoader
from picotron.optimizer.optimizer import make_optimizer, update_weights

ROOT = Path(__file__).parents[2]


def calls_of_a_step(layout: dict[str, Any]) -> set[tuple[str, str]]:
    """Build a rank's part of a model, take a step, and return the files and names of the functions that ran."""
    config, called = make_config(**{f"distributed__{key}": size for key, size in layout.items()}), set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            called.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))

    sys.setprofile(note)
    try:
        model = wrapped(config, tiny_llama(), as_train=True)
        _, step, _ = pipeline_of(config, tiny_llama(), CPU, torch.float64)
        step(model, MicroBatchDataLoader(random_rows(config), config, CPU))
        update_weights(model, make_optimizer(model, config), 1.0)
    finally:
        sys.setprofile(None)
    return called


def test_the_functions_run_in_a_step(pool: WorkerPool) -> None:
    called = set[tuple[str, str]]()
    for layout in ({"pp_size": 2, "tp_size": 2}, {"cp_size": 2, "dp_size": 2}):
        called |= set().union(*pool.run(calls_of_a_step, 4, layout))
    for path, *names in map(str.split, PATH.strip().splitlines()[1:]):  # the first is the loop itself
        for name in names:
            assert any(file == path and f"{each}.".startswith(f"{name}.") for file, each in called), name
