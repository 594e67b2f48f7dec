"""Train with a loss of your own: torchrun --nproc_per_node 2 -m docs.programs.own_loss --distributed.pp_size 2

The focal loss (Lin et al. 2017, arXiv:1708.02002) gives tokens that the model already predicts well a small weight.
Options are those of train.py; the config is docs/small.json.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from picotron.batches import Batch, forward_batch, split_batch, train_batch
from picotron.command_line import load_config
from picotron.console import print_line
from picotron.model.weights import initial_weights
from picotron.optimizer import AdamW, update_weights
from picotron.parallelize import build_model, check_run
from picotron.process_group_manager import setup_process_group_manager
from picotron.run.launch import exit_on_error, init_process_group, set_up_device
from picotron.train_step import make_evaluation, make_train_step


def focal_loss(head: Any, x: Tensor, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the sum of the losses, the number of tokens, and sums to report."""
    log_probs = head.log_probs(x, batch["target_ids"])  # (B, T/cp)
    losses = -((1 - log_probs.exp()) ** 2) * log_probs
    return losses.sum(), losses.numel(), {"cross entropy": -log_probs.sum()}


def log_probs_of_targets(head: Any, x: Tensor, batch: Batch) -> Tensor:
    return head.log_probs(x, batch["target_ids"])


def counting_rows(sequences: int, length: int) -> Batch:
    """Return rows of consecutive numbers: a task that is learnt in a few steps."""
    tokens = (torch.arange(length + 1) + 7 * torch.arange(sequences)[:, None]) % 50
    return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


def main() -> None:
    config = load_config(["--config", "docs/small.json", *sys.argv[1:]], check_run)
    model_config, plan = check_run(config)
    layout, training = config.distributed, config.training
    device, dtype = set_up_device(config), getattr(torch, config.model.dtype)
    init_process_group(config, device)
    grid = setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)

    model = build_model(config, model_config, plan, device, dtype, initial_weights(model_config, training.seed))
    optimizer = AdamW(model.parameters(), training, config.model.use_fused_adam)
    step = make_train_step(config, model_config, plan, device, dtype)
    evaluate = make_evaluation(config, model_config, plan, device, dtype)
    batch = counting_rows(config.global_batch_size, training.seq_length)
    batches = split_batch(batch, training.gradient_accumulation_steps, layout.cp_sharding)
    for number in range(1, training.total_train_steps + 1):
        loss, statistics = train_batch(step, model, batches, focal_loss)
        update_weights(model, optimizer, training.max_grad_norm)
        if grid.global_rank == 0:
            print_line(f"step {number} | focal loss {loss:.6f} | cross entropy {statistics['cross entropy']:.6f}")

    log_probs = forward_batch(evaluate, model, batches, log_probs_of_targets)
    if log_probs is not None:  # on the ranks with the last stage
        print_line(f"log-probabilities {list(log_probs.shape)}, mean {log_probs.mean():.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    exit_on_error(main)
