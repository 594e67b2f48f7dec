"""Position of a run in its steps and its data."""

import dataclasses
import math

from picotron.config import Config


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run: completed steps, tokens trained on, and the position in the data, in samples."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def after_step(self, config: Config) -> "Progress":
        batch = config.global_batch_size
        return Progress(self.step + 1, self.tokens + batch * config.training.seq_length, self.samples + batch)

    def is_printed(self, config: Config) -> bool:
        """Return whether the console shows this step: the first, the last, and every `logging.log_frequency` steps."""
        return self.step == 1 or self.is_end(config) or self.step % config.logging.log_frequency == 0

    def remaining(self, config: Config) -> int:
        """Return the number of steps until the end of the run."""
        training, tokens = config.training, config.global_batch_size * config.training.seq_length
        steps = training.total_train_steps - self.step
        if training.max_tokens is not None:
            steps = min(steps, math.ceil((training.max_tokens - self.tokens) / tokens))
        return max(0, steps)

    def is_end(self, config: Config) -> bool:
        return self.remaining(config) == 0
