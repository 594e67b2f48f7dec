"""Run a case in the pool's processes and compare it with the reference; shrink a case that differs."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from conformance.worker_pool import WorkerError, WorkerPool
from picotron.console import UserError
from tests.fuzz.cases import Case, smaller
from tests.fuzz.files import config_of, write_files
from tests.fuzz.pipelines import expected
from tests.fuzz.programs import expected_of_program
from tests.fuzz.reference import train_reference
from tests.fuzz.sequences import Mismatch
from tests.fuzz.work import run_part

LIMIT = 1e-9
SMALLEST_SCALE = 1e-4  # of the largest tensor: a gradient that is 0 in exact arithmetic has a rounding error


class Result(NamedTuple):
    """The outcome of a case: "equal", "refused" with the sentence, or "different" with what differs, or an error."""

    outcome: str
    text: str = ""
    error: float = 0.0


def check(pool: WorkerPool, case: Case, run: Callable[..., Any] = run_part) -> Result:
    """Run each part of a case on all ranks, and compare the results with those of the reference."""
    cache = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": ""})
    with tempfile.TemporaryDirectory(prefix="fuzz") as name, cache:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        try:
            if "program" in case:
                sizes, right = [case["program"]["ranks"]], [expected_of_program(case)]
            elif "modules" in case:
                sizes, right = [case["modules"]["pp"] * case["modules"]["dp"]], [expected(case)]
            else:
                write_files(case, folder)
                parts = [config_of(case, folder, part) for part in range(2 if case["resume"] else 1)]
                sizes, right = [config.distributed.world_size for config in parts], []
            found = []
            for part, size in enumerate(sizes):
                ranks = pool.run(run, size, case, folder, part, timeout=60)
                refusals = {rank.get("refused") for rank in ranks}
                if refusals != {None}:
                    return Result("refused" if len(refusals) == 1 else "different", " / ".join(map(str, refusals)))
                found.append(ranks)
            return compare(found, right or train_reference(case, folder))
        except UserError as error:
            return Result("refused", str(error))
        except Mismatch as error:
            return Result("different", str(error))
        except WorkerError as error:
            return Result("different", "\n".join(str(error).strip().splitlines()[-12:]))


def compare(found: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> Result:
    """Compare all ranks' results of all parts with those of the reference."""
    worst, where = 0.0, ""
    for part, (ranks, right) in enumerate(zip(found, expected, strict=True)):
        for rank, result in enumerate(ranks):
            for kind, values in result.items():
                named, wanted = tensors_of(values), tensors_of(right[kind])
                if named.keys() != wanted.keys():
                    return Result("different", f"{kind} of other parameters: {named.keys() ^ wanted.keys()}")
                largest = max((tensor.abs().max().item() for tensor in wanted.values() if tensor.numel()), default=0.0)
                for name, ours in named.items():
                    what, theirs = f"{kind} of {name}", wanted[name]
                    if ours.shape != theirs.shape:
                        return Result("different", f"{what}: {list(ours.shape)} values, expected {list(theirs.shape)}")
                    if ours.numel() == 0:
                        continue
                    scale = max(theirs.abs().max().item(), SMALLEST_SCALE * largest)
                    error = (ours - theirs).abs().max().item()
                    error = error / (scale or SMALLEST_SCALE) if error else 0.0
                    if not error <= worst:
                        worst, where = error, f"{what} on rank {rank} in part {part}: off by {error:.1e}"
                        if not error <= LIMIT:
                            shown = f"; {ours.tolist()}, expected {theirs.tolist()}" if ours.numel() <= 3 else ""
                            return Result("different", where + shown, error)
    return Result("equal", where, worst)


def tensors_of(values: Any) -> dict[Any, torch.Tensor]:
    """Return tensors by name: those of parameters, or the numbers of all steps."""
    return values if isinstance(values, dict) else {"all steps": torch.tensor(values, dtype=torch.float64)}


def shrink(pool: WorkerPool, case: Case) -> Case:
    """Simplify a case that differs, as long as it does, for a minute."""
    deadline, candidates = time.monotonic() + 60, smaller(case)
    while time.monotonic() < deadline and (candidate := next(candidates, None)) is not None:
        with contextlib.suppress(Exception):  # of sizes that transformers refuses
            if check(pool, candidate).outcome == "different":
                case, candidates = candidate, smaller(candidate)
    return case
