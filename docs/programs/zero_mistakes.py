"""Classic mistakes of ZeRO, see docs/programs/mistakes.py."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from docs.programs.mistake import Mistake
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.data_parallel.zero1 import SlicedBucket
from picotron.data_parallel.zero3 import Unit
from picotron.optimizer import AdamW
from tests.data_parallel import test_zero


def skip_data_parallel(tensor: Tensor, group: dist.ProcessGroup, *arguments: Any) -> None:
    if group is not pgm.process_group_manager.cp_dp_group:
        all_reduce(tensor, group, *arguments)


def decay_by_shape_of_slice(*arguments: Any, **options: Any) -> AdamW:
    """Build an optimizer that finds no matrices among its parameters, because slices are flat."""
    optimizer = AdamW(*arguments, **options)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    return optimizer


def do_not_gather(bucket: SlicedBucket) -> None:
    pass


correct_reduction = Unit.start_reduction


def overwrite_gradients(unit: Unit) -> Callable[[], None]:
    finish = correct_reduction(unit)

    def finish_without_earlier_gradients() -> None:
        unit.gradient_shard.zero_()
        finish()

    return finish_without_earlier_gradients


ZERO1 = "picotron.data_parallel.zero1"
STEPS = test_zero.test_ten_steps_equal_one_process
MISTAKES = {
    "norm_of_own_slices": Mistake(
        "zero",
        "Each rank clips by the norm of its own slices of the gradients.",
        {"picotron.optimizer.all_reduce": skip_data_parallel},
        STEPS,
        ("zero1", {"dp_size": 2}, {}),
    ),
    "decay_by_shape_of_slice": Mistake(
        "zero",
        "Weight decay applies to what has two dimensions, but slices are flat.",
        {"conformance.training.AdamW": decay_by_shape_of_slice},
        STEPS,
        ("zero1", {"dp_size": 2}, {}),
    ),
    "weights_not_gathered": Mistake(
        "zero",
        "After the optimizer's step, the ranks do not gather the updated weights.",
        {f"{ZERO1}.SlicedBucket.gather": do_not_gather},
        STEPS,
        ("zero1", {"dp_size": 2}, {}),
    ),
    "gradients_overwritten": Mistake(
        "zero",
        "The reduction of each micro-batch replaces the slice of the gradients, instead of adding to it.",
        {"picotron.data_parallel.zero3.Unit.start_reduction": overwrite_gradients},
        STEPS,
        ("zero3", {"dp_size": 2}, {}),
    ),
}
