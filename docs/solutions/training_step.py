"""Solutions of the exercises of docs/training_step.md; tests/test_exercises.py checks them."""

from collections.abc import Callable

from picotron.config import Config, Training


def place_of_sample(sample: int, config: Config) -> tuple[int, int, int, int]:
    """The step, micro-batch, dp rank and row in which a run meets a global sample: the contract, solved for these."""
    rows, ranks = config.training.micro_batch_size, config.distributed.dp_size
    step, rest = divmod(sample, config.global_batch_size)
    micro_batch, rest = divmod(rest, ranks * rows)
    return step, micro_batch, *divmod(rest, rows)


def warmup_stable_decay(training: Training, decay_steps: int) -> Callable[[int], float]:
    """A learning-rate factor that rises, stays at 1, and falls linearly to `min_lr_ratio` in the last `decay_steps`."""
    warmup, total, low = training.warmup_steps, training.total_train_steps, training.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = min(1.0, (total - step) / decay_steps)
        return low + (1 - low) * left

    return factor


def mean_loss(losses: list[float], targets: list[int]) -> float:
    """The mean over all targets of micro-batches that have different numbers of them, from each one's own mean."""
    return sum(loss * n for loss, n in zip(losses, targets, strict=True)) / sum(targets)
