"""The first tensor of a step in a narrow dtype that is less accurate than the dtype makes it.

A second run of the trainer, in float64, says where each tensor of a rank belongs: its tokens and columns, see `Trace`.
The run in the narrow dtype has the same calls, so the errors of its tensors are known, too. They are compared with
those of the reference whose operations are rounded at random, tensor by tensor.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.compare import mean_error
from conformance.reference import train
from conformance.rounding import Rounding, root_mean_square
from conformance.trace import Trace, fields_of
from conformance.trace_recorder import Record, Recorder, read_records
from conformance.trace_tensors import Key, Local, Phase
from conformance.trace_text import many, short

RUNS = 3
ACCURACY = 1.25  # Six further roundings of each score in attention take 1.2, statistics of a norm in bfloat16 1.3.


def twin_of(case: Case) -> Case:
    """Return the same case in float64."""
    return dataclasses.replace(case, dtype="float64", folder=case.folder / "exact")


def write_twin(case: Case) -> None:
    """Write the case in float64 beside a case, with the same model and batches."""
    twin = twin_of(case)
    twin.output.mkdir(parents=True)
    (twin.folder / "trace").mkdir()
    twin.model_folder.symlink_to(case.model_folder)
    (twin.folder / "batches.safetensors").symlink_to(case.folder / "batches.safetensors")
    twin.write()


def errors_of_rounding(trace: Trace, dtype: torch.dtype) -> dict[Key, float]:
    """Return the root mean square error that rounding to a dtype makes in each tensor of the reference."""
    errors = dict[Key, list[float]]()
    for seed in range(RUNS):
        model = trace.case.model()
        with Recorder() as recorder:
            train(model, trace.case, trace.case.batch, rounding=Rounding(dtype, seed, model))
        for key, found in trace.tensors_of(recorder.records).items():
            if key in trace.right:
                right = trace.right[key].x
                errors.setdefault(key, []).append(mean_error(found.x, right, right))
    spread = {key: root_mean_square(each) for key, each in errors.items()}
    for key in trace.right.keys() - errors.keys():  # of several modules
        parts = [(*key[:2], name, key[3]) for name in key[2].split(" + ")]
        if all(part in errors for part in parts):
            spread[key] = max(spread[part] for part in parts)
    return spread


def least_accurate(trace: Trace, case: Case) -> tuple[str, dict[str, Any]]:
    """Return a sentence about the first tensor whose error rounding does not explain, and its fields, see
    `Trace.first`; or a sentence about the number of tensors that are compared.

    Args:
        trace: trace of the case in float64.
        case: the case in a narrow dtype, whose ranks have written their records.
    """
    records = [read_records(case, rank)[1] for rank in range(case.world_size)]
    limits, step, count = errors_of_rounding(trace, case.torch_dtype), case.first_step, 0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        trace.find_factors(step, phase)
        for key in (key for key in trace.keys(step, phase) if limits.get(key)):
            locals_ = [each for each in trace.at[key] if each.rows is not None and trace.is_right(each)]
            found = [narrow(trace, each, records) for each in locals_]
            want = [each.right[each.rows][:, each.columns] for each in locals_]
            if not locals_ or any(x is None or x.shape != y.shape for x, y in zip(found, want, strict=True)):
                continue
            count += len(locals_)
            x, right = (torch.cat([part.flatten() for part in each if part is not None]) for each in (found, want))
            error = mean_error(x, right, right)
            if error > ACCURACY * limits[key]:
                ranks = sorted({each.rank for each in locals_})
                of = "gradient of " if phase == Phase.BACKWARD else ""
                return (
                    f"step {step + 1}: {of}{short(key[2])} {key[3]} on {many('rank', ranks)} is less accurate than it must "
                    f"be: its error is {error:.1e} of it, and {limits[key]:.1e} if each operation rounds"
                ), fields_of(key, ranks)
    return f"traced: {count} tensors are as accurate as {case.dtype} can be", {}


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
