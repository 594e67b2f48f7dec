"""Train with a loss of your own: python -m docs.programs.own_loss --distributed.pp_size 2

The focal loss (Lin et al. 2017, arXiv:1708.02002) gives tokens that the model already predicts well a small weight.
Options are those of train.py; the config is docs/small.json.
"""

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.config import Config
from workbench.console import print_line
from workbench.own_loops.batches import Batch, forward_batch
from workbench.own_loops.log_probs import log_probs
from workbench.own_loops.trainer import Data, set_up
from workbench.run.config_reader import load_config
from workbench.run.launch import exit_on_error, set_up_logging
from workbench.run.ranks import run_ranks


def focal_loss(head: Any, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses, the number of targets that count, and sums to report."""
    target_log_probs = log_probs(head, x, batch["target_ids"])  # (B, T/cp), 0 for targets of -100
    losses = -((1 - target_log_probs.exp()) ** 2) * target_log_probs
    counted = batch["target_ids"] != -100  # not prompts
    return losses.sum(), counted.sum(), {"cross entropy": -target_log_probs.sum()}


def log_probs_of_targets(head: Any, x: Tensor, batch: Batch) -> Tensor:
    return log_probs(head, x, batch["target_ids"])


def counting_rows(sequences: int, length: int) -> Batch:
    """Return rows of consecutive numbers: a task that is learnt in a few steps."""
    tokens = (torch.arange(length + 1) + 7 * torch.arange(sequences)[:, None]) % 50
    return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


def main() -> None:
    set_up_logging()
    config = load_config(["--config", "docs/small.json", *sys.argv[1:]])
    run_ranks(config.distributed.world_size, functools.partial(train, config))


def train(config: Config) -> None:
    with set_up(config, Data()) as trainer:
        batches = trainer.split(counting_rows(config.global_batch_size, config.training.seq_length))
        for _ in trainer.steps():
            trainer.log(trainer.train(batches, focal_loss))

        log_probs = forward_batch(trainer.evaluate, trainer.model, batches, log_probs_of_targets)
        if log_probs is not None and pgm.process_group_manager.tp_rank == 0:  # one of the ranks with the last stage
            print_line(f"log-probabilities {list(log_probs.shape)}, mean {log_probs.mean():.6f}")


if __name__ == "__main__":
    exit_on_error(main)
