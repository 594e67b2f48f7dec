"""Solutions to the exercises of docs/training_step.md, which tests/test_exercises.py checks."""

from collections.abc import Callable

from picotron.config import Config, Training


def place_of_sample(sample: int, config: Config) -> tuple[int, int, int, int]:
    """Return the step, micro-batch, dp rank and row in which a sample is used: the inverse of the page's formula."""
    rows, ranks = config.training.micro_batch_size, config.distributed.dp_size
    step, rest = divmod(sample, config.global_batch_size)
    micro_batch, rest = divmod(rest, ranks * rows)
    return step, micro_batch, *divmod(rest, rows)


def warmup_stable_decay(training: Training, decay_steps: int) -> Callable[[int], float]:
    """Return a learning-rate factor that rises, stays at 1, and falls linearly to `min_lr_ratio` in the last
    `decay_steps` steps.
    """
    warmup, total, low = training.warmup_steps, training.total_train_steps, training.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        remaining = min(1.0, (total - step) / decay_steps)
        return low + (1 - low) * remaining

    return factor


def mean_loss(losses: list[float], targets: list[int]) -> float:
    """Return the mean over all targets, from the mean loss of each micro-batch and its number of targets."""
    return sum(loss * n for loss, n in zip(losses, targets, strict=True)) / sum(targets)
