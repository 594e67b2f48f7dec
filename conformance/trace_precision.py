"""The first tensor of a step in a narrow dtype that is less accurate than the dtype makes it.

A second run of the trainer, in float64, says where each tensor of a rank belongs: its tokens and columns, see `Trace`.
The run in the narrow dtype has the same calls, so the errors of its tensors are known, too. They are compared with
those of the reference whose operations are rounded at random, tensor by tensor.
"""

import dataclasses
import math
import pickle
from pathlib import Path

import torch
from torch import Tensor

from conformance.case import Case
from conformance.reference import train
from conformance.rounding import Rounding
from conformance.trace import Key, Local, Phase, Trace
from conformance.trace_recorder import Record, Recorder
from conformance.trace_text import many, short

RUNS = 3
ACCURACY = 1.25  # Six further roundings of each score in attention take 1.2, statistics of a norm in bfloat16 1.3.


def twin_of(case: Case) -> Case:
    """Write a case in float64 beside a case, with the same model and batches."""
    twin = dataclasses.replace(case, dtype="float64", folder=case.folder / "exact")
    twin.output.mkdir(parents=True)
    (twin.folder / "trace").mkdir()
    twin.model_folder.symlink_to(case.model_folder)
    (twin.folder / "batches.safetensors").symlink_to(case.folder / "batches.safetensors")
    twin.write()
    return twin


def errors_of_rounding(trace: Trace, dtype: torch.dtype) -> dict[Key, float]:
    """Return the root mean square error that rounding to a dtype makes in each tensor of the reference."""
    squares = dict[Key, float]()
    for seed in range(RUNS):
        model = trace.case.model()
        with Recorder() as recorder:
            train(model, trace.case, trace.case.batch, rounding=Rounding(dtype, seed, model))
        for key, found in trace.tensors_of(recorder.records).items():
            if key in trace.right:
                squares[key] = squares.get(key, 0.0) + relative_square(found.x, trace.right[key].x) / RUNS
    for key in trace.right.keys() - squares.keys():  # of several modules
        parts = [(*key[:2], name, key[3]) for name in key[2].split(" + ")]
        if all(part in squares for part in parts):
            squares[key] = max(squares[part] for part in parts)
    return {key: math.sqrt(square) for key, square in squares.items()}


def relative_square(found: Tensor, right: Tensor) -> float:
    return ((found - right).square().sum() / right.square().sum().clamp(min=1e-300)).item()


def least_accurate(trace: Trace, folder: Path, dtype: torch.dtype) -> tuple[str, int]:
    """Return a sentence about the first tensor whose error rounding does not explain, "" if there is none, and the
    number of tensors that are compared.

    Args:
        trace: of the run in float64.
        folder: records of the run in the narrow dtype.
    """
    ranks = range(trace.case.world_size)
    records: list[list[Record]] = [pickle.loads((folder / f"rank{rank}").read_bytes())[1] for rank in ranks]
    limits, step, count = errors_of_rounding(trace, dtype), trace.case.first_step, 0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        trace.find_factors(step, phase)
        for key in (key for key in trace.keys(step, phase) if limits.get(key)):
            locals_ = [each for each in trace.at[key] if each.rows is not None and trace.is_right(each)]
            found = [narrow(trace, each, records) for each in locals_]
            want = [each.right[each.rows][:, each.columns] for each in locals_]
            if not locals_ or any(x is None or x.shape != y.shape for x, y in zip(found, want, strict=True)):
                continue
            count += len(locals_)
            error = math.sqrt(
                relative_square(*(torch.cat([x.flatten() for x in each if x is not None]) for each in (found, want)))
            )
            if error > ACCURACY * limits[key]:
                of, at = "gradient of " if phase == Phase.BACKWARD else "", many("rank", [w.rank for w in locals_])
                return (
                    f"step {step + 1}: {of}{short(key[2])} {key[3]} on {at} is less accurate than it must be: its error "
                    f"is {error:.1e} of it, and {limits[key]:.1e} if each operation rounds"
                ), count
    return "", count


def narrow(trace: Trace, each: Local, records: list[list[Record]]) -> Tensor | None:
    """Return a tensor of the run in the narrow dtype, or the sum of the ranks' tensors if only that is right."""
    total = None
    for peer in trace.peers(each) if each.ranks else [each]:
        values = records[peer.rank][peer.index].values
        x = values.x if peer.value is None else values.grad
        if x is None or x.numel() % peer.length:
            return None
        x = x.reshape(peer.length, -1)[peer.kept]
        x = x[:, : peer.x.size(1)] / trace.factors.get((*peer.key[:2], peer.rank), 1.0)
        total = x if total is None else total + x
    return total
