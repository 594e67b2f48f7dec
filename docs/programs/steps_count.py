"""Memory and communication of each step of docs/steps, counted on rank 0:

python -m docs.programs.steps_count
python -m docs.programs.steps_count --out docs/pictures/steps.svg
"""

import argparse
import importlib
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.worker_pool import WorkerPool
from docs.programs import steps_count
from docs.programs.steps_diff import changed, lines_of
from docs.programs.svg import RANKS, WIDTH, Svg
from docs.steps import communication, llama
from picotron.console import text_table

LAYOUTS: dict[str, dict[str, int]] = {
    "s1_one_process": {},
    "s2_tp": {"tp": 2},
    "s3_sp": {"tp": 2},
    "s4_dp": {"dp": 2, "tp": 1},
    "s5_buckets": {"dp": 2, "tp": 1},
    "s6_zero": {"dp": 2, "tp": 1},
    "s7_pp": {"dp": 1, "pp": 2, "tp": 1},
    "s8_1f1b": {"dp": 1, "pp": 2, "tp": 1},
    "s9_cp": {"dp": 1, "pp": 1, "cp": 2, "tp": 1},
}
KIB = 1024


class Kept:
    """A tensor that autograd keeps for backward. Tensors with the same storage count once, and weights do not count."""

    weights: ClassVar[set[int]] = set()  # their storages
    users: ClassVar[Counter[int]] = Counter()  # of each storage
    now: ClassVar[int] = 0  # bytes of all storages that have users
    peak: ClassVar[int] = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
        if not Kept.users[self.key] and self.key not in Kept.weights:
            Kept.now += tensor.untyped_storage().nbytes()
            Kept.peak = max(Kept.peak, Kept.now)
        Kept.users[self.key] += 1

    def __del__(self) -> None:
        Kept.users[self.key] -= 1
        if not Kept.users[self.key] and self.key not in Kept.weights:
            Kept.now -= self.tensor.untyped_storage().nbytes()


class Counts(NamedTuple):
    """What rank 0 holds, in bytes, and sends in a step, except the loss that it prints."""

    weights: int
    moments: int
    activations: int  # the most that autograd keeps for backward at a time
    collectives: int
    messages: int
    during_backward: int  # collectives that backward does not wait for
    sent: int  # bytes, if collectives use a ring


def count(name: str) -> Counts:
    """Train for one step on this rank, and count."""
    program: Any = importlib.import_module(f"docs.steps.{name}")
    calls: list[tuple[str, int, bool]] = []  # operation, bytes sent, whether it is asynchronous
    optimizers: list[torch.optim.AdamW] = []
    train_step, make_optimizer = program.train_step, torch.optim.AdamW

    def counting(operation: str, tensor_at: int, times: int) -> Callable[..., Any]:
        """Count calls of an operation that sends a tensor, in a ring of n ranks `times` (n - 1) times."""
        call = getattr(dist, operation)

        def counted(*arguments: Any, group: Any = None, **options: Any) -> Any:
            if group is not None and dist.get_world_size(group) > 1:
                hops = times * (dist.get_world_size(group) - 1) if times else 1
                share = dist.get_world_size(group) if operation == "all_reduce" else 1  # it sends an n-th at a time
                calls.append((operation, hops * arguments[tensor_at].nbytes // share, options.get("async_op", False)))
            return call(*arguments, group=group, **options)

        return counted

    def counted_step(model: nn.Module, micro_batches: Any) -> Tensor:
        Kept.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        Kept.users, Kept.now, Kept.peak = Counter(), 0, 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            return train_step(model, micro_batches)

    def noted_optimizer(*arguments: Any) -> torch.optim.AdamW:
        optimizers.append(make_optimizer(*arguments))
        return optimizers[-1]

    with (
        mock.patch.object(llama, "STEPS", 1),
        mock.patch.object(program, "train_step", counted_step),
        mock.patch.object(torch.optim, "AdamW", noted_optimizer),
        mock.patch.object(dist, "all_reduce", counting("all_reduce", 0, 2)),
        mock.patch.object(dist, "all_gather", counting("all_gather", 1, 1)),
        mock.patch.object(dist, "reduce_scatter", counting("reduce_scatter", 0, 1)),
        mock.patch.object(dist, "isend", counting("isend", 0, 0)),
    ):
        model, _ = program.train(**LAYOUTS[name])
    communication.group.clear()  # the threads of a group end with its last reference
    return Counts(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        moments=sum(2 * weight.nbytes for group in optimizers[0].param_groups for weight in group["params"]),
        activations=Kept.peak,
        collectives=sum(operation != "isend" for operation, _, _ in calls),
        messages=sum(operation == "isend" for operation, _, _ in calls),
        during_backward=sum(is_async for _, _, is_async in calls),
        sent=sum(size for _, size, _ in calls),
    )


def count_all() -> dict[str, Counts]:
    """Count all steps, each on as many processes as its layout needs."""
    pool = WorkerPool()  # its processes import `count` by the name of its module
    counts = {name: pool.run(steps_count.count, math.prod(LAYOUTS[name].values()), name)[0] for name in LAYOUTS}
    pool.close()
    return counts


def layout_of(name: str) -> str:
    return " ".join(f"{axis} {size}" for axis, size in LAYOUTS[name].items() if size > 1)


def table() -> str:
    heading = "step lines changed layout weights moments activations collectives async messages sent"
    rows = [heading.split()]
    for (name, counts), before in zip(count_all().items(), [None, *LAYOUTS], strict=False):
        removed, added = changed(lines_of(before), lines_of(name)) if before else (0, 0)
        row = [name, str(len(lines_of(name))), f"+{added} -{removed}" if before else "", layout_of(name)]
        row += [f"{size / KIB:,.0f}" for size in (counts.weights, counts.moments, counts.activations)]
        row += [str(counts.collectives), str(counts.during_backward), str(counts.messages), f"{counts.sent / KIB:,.0f}"]
        rows.append(row)
    return text_table(rows, first_number=4)


def picture() -> str:
    """Draw what rank 0 holds in each step as a bar."""
    parts, row, left, all_counts = ("weights", "moments", "activations"), 34, 230, count_all()
    scale = (WIDTH - left) / max(counts.weights + counts.moments + counts.activations for counts in all_counts.values())
    drawing = Svg(WIDTH, (len(all_counts) + 1) * row)
    for i, part in enumerate(parts):
        drawing.box(left + 150 * i, 0, 18, 18, RANKS[i])
        drawing.text(left + 150 * i + 25, 15, part)
    for i, (name, counts) in enumerate(all_counts.items(), start=1):
        drawing.text(0, i * row + 19, f"{name}  {layout_of(name)}")
        x = float(left)
        for part, colour in zip(parts, RANKS, strict=False):
            size = getattr(counts, part)
            label = f"{size / KIB:,.0f}"
            drawing.box(x, i * row, size * scale, row - 8, colour, label, f"{part}: {label} KiB")
            x += size * scale
    return str(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what rank 0 holds and sends in each step of docs/steps.")
    parser.add_argument("--out", type=Path, help="draw what it holds into this SVG file, instead of printing a table")
    options = parser.parse_args()
    if options.out:
        options.out.write_text(picture())
    else:
        print("What rank 0 holds, in KiB, and sends in a step, in KiB. Numbers are float64.\n")
        print(table())


if __name__ == "__main__":
    main()
