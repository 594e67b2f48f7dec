"""Gradient noise scale of a small model while it trains: an estimate of the critical batch size.

    python -m docs.programs.noise_scale

The trace of the covariance of the gradients of single sequences, divided by the squared norm of their mean, is the
number of sequences in a batch for which noise and signal are equally large (McCandlish et al. 2018, arXiv:1812.06162).
The model is that of docs/small.json.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from picotron.batches import cross_entropy
from picotron.command_line import load_config
from picotron.console import text_table
from picotron.model.weights import main_grad
from picotron.trainer import Trainer, set_up

MEASURED, SEQUENCES = (0, 20, 60), 128


def noise_scale(gradients: Iterable[Tensor]) -> float:
    """Return the gradient noise scale in sequences, for the gradients of single sequences.

    The squared norm of a mean of n gradients is on average that of the true gradient, plus the trace divided by n. The
    squared norms for n = 1 and for all gradients therefore give both (appendix A.1 of the paper).
    """
    n, squares, total = 0, 0.0, torch.zeros(())
    for gradient in gradients:
        n, squares, total = n + 1, squares + float(gradient.square().sum()), total + gradient
    one, every = squares / n, float((total / n).square().sum())
    trace = (one - every) / (1 - 1 / n)
    return trace / (one - trace)


def gradients_of(trainer: Trainer, batches: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
    """Yield the gradient of each sequence, as one vector. Weights and optimizer stay as they are."""
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            one = {key: None if value is None else value[row : row + 1] for key, value in batch.items()}
            trainer.model(**one).backward()
            trainer.model.finish_grad_sync()
            yield torch.cat([main_grad(parameter).flatten() for parameter in trainer.model.parameters()])
            trainer.optimizer.zero_grad()


def main() -> None:
    options = ["--training.total_train_steps", "61", "--checkpoint.save_dir", "runs/noise"]
    config = load_config(["--config", "docs/small.json", *options])
    rows = [["steps", "loss", "noise scale, sequences", "tokens"]]
    with set_up(config) as trainer:
        measured = [batch for _ in range(SEQUENCES // config.global_batch_size) for batch in trainer.next_batches()]
        for step in islice(trainer.steps(), MEASURED[-1] + 1):
            scale = noise_scale(gradients_of(trainer, measured)) if step in MEASURED else 0.0
            record = trainer.train(trainer.next_batches(), cross_entropy)
            if step in MEASURED:
                tokens = scale * config.training.seq_length
                rounded = (f"{float(f'{number:.2g}'):,.0f}" for number in (scale, tokens))  # two digits
                rows.append([f"{step}", f"{record['loss']:.2f}", *rounded])
    print(text_table(rows, first_number=0))


if __name__ == "__main__":
    main()
