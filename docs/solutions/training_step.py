"""Solution to the exercise of docs/training_step.md, which tests/docs/test_exercises.py checks."""

from collections.abc import Callable

from picotron.config import Training


def wsd_sqrt(training: Training) -> Callable[[int], float]:
    """Return the learning-rate factor of WSD with a decay to `min_lr_ratio` that has the shape 1 - sqrt(x) (Hägele et
    al. 2024, arXiv:2405.18392).
    """
    warmup, total, low = training.warmup_steps, training.total_train_steps, training.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        decayed = min(1.0, max(0.0, 1 - (total - step) / training.decay))
        return low + (1 - low) * (1 - decayed**0.5)

    return factor
