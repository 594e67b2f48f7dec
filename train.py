"""Train a Llama-like model:  torchrun --nproc_per_node 4 train.py --config template/base_config.json

This file is the story of a run, told from top to bottom. Each chapter is a file of the package:
config -> data -> process groups -> model -> parallelism -> optimizer -> steps.
"""

import logging
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from picotron.checkpoint import pretrained_value
from picotron.config import Config, UserError, check_world_size
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.metrics import Metrics, check_save_dir
from picotron.model import Llama, fused_attention, load_model_config, math_attention
from picotron.optimizer import AdamW, clip_grad_norm, make_scheduler
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from picotron.tokens import load_tokens
from picotron.utils import exit_on_error
from picotron.weights import initial_value, materialise

logger = logging.getLogger("picotron")


def train_step(model: DataParallel, data_loader: MicroBatchDataLoader, device: torch.device) -> torch.Tensor:
    """Forward and backward for this rank's micro-batches of one global batch; gradients end up in `main_grad`.

    Returns the mean loss over this rank's tokens, a scalar that stays on the device.
    """
    total_loss = torch.zeros((), device=device)
    for i in range(data_loader.grad_acc_steps):
        # Gradients add up over the micro-batches; only the last backward averages the sum over the other ranks.
        model.require_backward_grad_sync = i == data_loader.grad_acc_steps - 1
        loss = model(**next(data_loader)) / data_loader.grad_acc_steps
        loss.backward()
        total_loss = total_loss + loss.detach()
    model.finish_grad_sync()
    return total_loss


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)

    # What to do. Mistakes are found here, before anything expensive starts.
    config = load_config(sys.argv[1:])
    check_world_size(config.distributed, world_size)
    check_save_dir(config)
    device, dtype = set_up_device(config), getattr(torch, config.model.dtype)
    model_config = load_model_config(config.model)
    check_tensor_parallel(model_config, config.distributed.tp_size)

    # The grid of processes.
    init_process_group(config, device)
    layout = config.distributed
    grid = setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)

    # Data: tokenised by one process, memory-mapped by all.
    tokens = load_tokens(config, model_config)
    data_loader = MicroBatchDataLoader(tokens, config, device)

    # The model, and around it what makes it parallel.
    llama = build_model(config, model_config, device, dtype)
    model = DataParallelBucket(llama)

    # Training.
    optimizer = AdamW(model.parameters(), config.training, config.model.use_fused_adam)
    scheduler = make_scheduler(optimizer, config.training)
    metrics = Metrics(config, model_config, device, dtype)
    logger.info("%s | %s parameters, %s on %s", grid, f"{metrics.parameters:,}", config.model.dtype, device)
    logger.info("%s tokens of %s, %s per step", f"{len(tokens):,}", config.dataset.name, f"{metrics.tokens_per_step:,}")

    step = 0
    max_tokens = config.training.max_tokens or math.inf
    while step < config.training.total_train_steps and step * metrics.tokens_per_step < max_tokens:
        loss = train_step(model, data_loader, device)
        grad_norm = clip_grad_norm(model, config.training.max_grad_norm)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        metrics.log(step, loss, grad_norm, learning_rate)

    metrics.close()
    guess = math.log(model_config.vocab_size)
    logger.info("loss %.4f -> %.4f (a uniform guess has %.4f)", metrics.first_loss, metrics.last_loss, guess)
    logger.info("config.json and metrics.jsonl are in %s", Path(config.checkpoint.save_dir).resolve())
    dist.destroy_process_group()


def set_up_device(config: Config) -> torch.device:
    """This process's device, and how many threads it may use."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(config.environment.TOKENIZERS_PARALLELISM).lower()
    torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    if config.distributed.use_cpu:
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if count == 0:
        raise UserError("this machine has no CUDA device; run on the CPU with --distributed.use_cpu true")
    if local_rank >= count:
        raise UserError(
            f"process {local_rank} of this machine needs a GPU of its own, but it has {count}; start {count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_process_group(config: Config, device: torch.device) -> None:
    """Meet the other processes that torchrun started; without torchrun, this process is all there is."""
    backend = config.distributed.backend or ("nccl" if device.type == "cuda" else "gloo")
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def build_model(config: Config, model_config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Llama:
    """A Llama with its initial or pretrained weights.

    It is built on the meta device first, a description without memory, so that each process only ever holds what is
    its own.
    """
    attend = fused_attention if config.model.use_flash_attention else math_attention
    with torch.device("meta"):
        model = Llama(model_config, attend, config.training.activation_checkpointing == "full").to(dtype)
        model = apply_tensor_parallel(model, config.distributed.sequence_parallel)
    if config.model.pretrained:
        materialise(model, device, pretrained_value(config.model.name))
    else:
        materialise(model, device, initial_value(model_config, config.training.seed))
    if config.training.compile:
        for layer in model.model.layers:
            layer.compile()
    return model


if __name__ == "__main__":
    exit_on_error(main)
