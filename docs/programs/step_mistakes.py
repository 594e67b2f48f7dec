"""Classic mistakes of a training step, see docs/programs/mistakes.py."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from docs.programs.mistake import Mistake
from picotron.config import Training
from picotron.data.loader import micro_batch_samples
from picotron.optimizer import AdamW, learning_rate_factor
from tests.context_parallel import test_context_parallel
from tests.data_parallel import test_data_parallel


def undivided_train_step(model: Any, data_loader: Any, device: torch.device) -> Tensor:
    total_loss = torch.zeros((), device=device)
    for i in range(data_loader.grad_acc_steps):
        model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1
        loss = model(**next(data_loader))
        loss.backward()
        total_loss = total_loss + loss.detach() / data_loader.grad_acc_steps
    model.finish_grad_sync()
    return total_loss


def do_not_sum(*_: Any) -> None:
    pass


def decay_everything(parameters: Any, training: Training, fused: bool) -> AdamW:
    optimizer = AdamW(parameters, training, fused)
    for group in optimizer.param_groups:
        group["weight_decay"] = training.weight_decay
    return optimizer


def one_step_late(training: Training) -> Callable[[int], float]:
    factor = learning_rate_factor(training)
    return lambda step: factor(step - 1) if step else 0.0


def samples_of_rank_0(rows: Any, samples: Any, dp_rank: int, *arguments: Any) -> Iterator[Any]:
    return micro_batch_samples(rows, samples, 0, *arguments)


STEPS = test_data_parallel.test_ten_steps_equal_one_process
MISTAKES = {
    "loss_not_divided": Mistake(
        "training_step",
        "train_step divides the logged loss by the number of micro-batches, but not the loss that backward starts at.",
        {"picotron.train_step.train_step": undivided_train_step},
        STEPS,
        (1, "bucket", 3, False),
    ),
    "clipped_by_own_norm": Mistake(
        "training_step",
        "Each rank clips by the norm of its own gradients.",
        {"picotron.optimizer.all_reduce": do_not_sum},
        test_context_parallel.test_ten_steps_equal_one_process,
        ({"tp_size": 2},),
    ),
    "decay_of_norms": Mistake(
        "training_step",
        "Weight decay applies to norms and biases as well as to matrices.",
        {"conformance.training.AdamW": decay_everything},
        STEPS,
        (1, "bucket", 3, False),
    ),
    "schedule_one_step_late": Mistake(
        "training_step",
        "The learning-rate schedule is one step late, so the first step has a learning rate of 0.",
        {"picotron.optimizer.learning_rate_factor": one_step_late},
        STEPS,
        (1, "bucket", 3, False),
    ),
    "same_sequences": Mistake(
        "training_step",
        "All data-parallel ranks read the sequences of dp rank 0.",
        {"picotron.data.loader.micro_batch_samples": samples_of_rank_0},
        STEPS,
        (2, "bucket", 3, False),
    ),
}
