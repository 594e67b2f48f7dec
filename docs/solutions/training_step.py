"""Solution to the exercise of docs/training_step.md, which tests/docs/test_exercises.py checks."""

from collections.abc import Callable

from picotron.config import Training


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
