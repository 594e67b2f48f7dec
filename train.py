"""Train a Llama-like model:  torchrun --nproc_per_node 4 train.py --config template/base_config.json

This file is the story of a run, told from top to bottom. Each chapter is a file of the package:
config -> data -> process groups -> model -> parallelism -> optimizer -> steps.
"""

import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from picotron.checkpoint import pretrained_value
from picotron.config import Config, UserError, check_world_size
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader, load_tokens
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.metrics import Metrics
from picotron.model import Llama, fused_attention, initial_value, load_model_config, materialise, math_attention
from picotron.optimizer import AdamW, clip_grad_norm, make_scheduler
from picotron.process_group_manager import setup_process_group_manager
from picotron.utils import exit_on_error

logger = logging.getLogger("picotron")


def train_step(model: DataParallelBucket, data_loader: MicroBatchDataLoader, device: torch.device) -> torch.Tensor:
    """Forward and backward for this rank's micro-batches of one global batch; gradients end up in `main_grad`.

    Returns the mean loss over this rank's tokens, a scalar that stays on the device.
    """
    total_loss = torch.zeros((), device=device)
    for i in range(data_loader.grad_acc_steps):
        batch = {name: tensor.to(device) for name, tensor in next(data_loader).items() if tensor is not None}
        # Gradients add up over the micro-batches; only the last backward averages the sum over the other ranks.
        model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1
        logits = model(batch["input_ids"], batch["position_ids"])  # (B, T, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten()) / data_loader.grad_acc_steps
        loss.backward()
        total_loss = total_loss + loss.detach()
    return total_loss


def main() -> None:
    # What to do. Every mistake in it ends the run here, before anything expensive starts.
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    config = load_config(sys.argv[1:])
    check_world_size(config.distributed, world_size)
    device, dtype = set_up_device(config), getattr(torch, config.model.dtype)
    model_config = load_model_config(config.model)

    # Data: tokenised by the first process that gets here, memory-mapped by all.
    tokens = load_tokens(config, model_config)

    # The grid of processes.
    backend = config.distributed.backend or ("nccl" if device.type == "cuda" else "gloo")
    rendezvous: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **rendezvous)
    d = config.distributed
    grid = setup_process_group_manager(d.tp_size, d.cp_size, d.pp_size, d.dp_size)
    data_loader = MicroBatchDataLoader(tokens, config)

    # The model: a description without memory first, so that each process only ever holds its own part.
    with torch.device("meta"):
        attend = fused_attention if config.model.use_flash_attention else math_attention
        llama = Llama(model_config, attend, config.training.activation_checkpointing == "full").to(dtype)
    parameters = sum(p.numel() for p in llama.parameters())
    value = (
        pretrained_value(config.model.name)
        if config.model.pretrained
        else initial_value(model_config, config.training.seed)
    )
    materialise(llama, device, value)
    if config.training.compile:
        for layer in llama.model.layers:
            layer.compile()
    model = DataParallelBucket(llama)

    optimizer = AdamW(model.parameters(), config.training, config.model.use_fused_adam)
    scheduler = make_scheduler(optimizer, config.training)
    metrics = Metrics(config, model_config, device, dtype)
    logger.info(
        "%s | %s parameters | %s on %s | %s tokens of %s",
        grid,
        f"{parameters:,}",
        dtype,
        device,
        f"{len(tokens):,}",
        config.dataset.name,
    )

    step = 0
    tokens_per_step = config.global_batch_size * config.training.seq_length
    max_tokens = config.training.max_tokens or math.inf
    while step < config.training.total_train_steps and step * tokens_per_step < max_tokens:
        loss = train_step(model, data_loader, device)
        grad_norm = clip_grad_norm(model.parameters(), config.training.max_grad_norm)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        metrics.log(step, loss, grad_norm, learning_rate)

    metrics.close()
    logger.info(
        "loss %.4f -> %.4f in %d steps (a uniform guess has %.4f)\nconfig.json and metrics.jsonl are in %s",
        metrics.first_loss, metrics.last_loss, step, math.log(model_config.vocab_size), Path(config.checkpoint.save_dir).resolve(),
    )  # fmt: skip
    dist.destroy_process_group()


def set_up_device(config: Config) -> torch.device:
    """This process's device and threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(config.environment.TOKENIZERS_PARALLELISM).lower()
    torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    if config.distributed.use_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device; run on the CPU with --distributed.use_cpu true")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}; start fewer processes"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    exit_on_error(main)
