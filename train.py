"""Train a Llama-like model:  torchrun --nproc_per_node 8 train.py --config template/base_config.json

This file is the story of a run, told from top to bottom. Each chapter is a file of the package:
config -> data -> process groups -> model -> parallelism -> optimizer -> steps.
"""

import functools
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from picotron.checkpoint import pretrained_value
from picotron.config import Config, check_world_size
from picotron.config_reader import load_config
from picotron.context_parallel.context_parallel import apply_context_parallel, check_context_parallel
from picotron.data import MicroBatchDataLoader, hold_out
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.metrics import Metrics, check_save_dir
from picotron.model import Llama, fused_attention, load_model_config, math_attention
from picotron.optimizer import AdamW, clip_grad_norm, make_scheduler
from picotron.pipeline_parallel.pipeline_parallel import (
    PipelineParallel,
    check_pipeline_parallel,
    evaluate,
    hidden_states_shape,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from picotron.tokens import load_tokens
from picotron.utils import exit_on_error, init_process_group, set_up_device
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


def pick_train_step(
    config: Config, tensor_shapes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Callable[[DataParallel, MicroBatchDataLoader], torch.Tensor]:
    """The training step that a config asks for."""
    if config.distributed.pp_size == 1:
        return functools.partial(train_step, device=device)
    loops = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}
    loop = loops[config.distributed.pp_engine]
    return functools.partial(loop, tensor_shapes=tensor_shapes, device=device, dtype=dtype)


def main() -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)

    # What to do. Mistakes are found here, before anything expensive starts.
    config = load_config(sys.argv[1:])
    if config.logging.level == "debug":
        logging.getLogger("picotron.pipeline").setLevel(logging.DEBUG)
    check_world_size(config.distributed, world_size)
    check_save_dir(config)
    device, dtype = set_up_device(config), getattr(torch, config.model.dtype)
    model_config = load_model_config(config.model)
    check_tensor_parallel(model_config, config.distributed.tp_size)
    check_pipeline_parallel(model_config, config.distributed.pp_size)
    check_context_parallel(model_config, config.distributed)

    # The grid of processes.
    init_process_group(config, device)
    layout = config.distributed
    grid = setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)

    # Data: tokenised by one process, memory-mapped by all.
    tokens = load_tokens(config, model_config)
    train_tokens, eval_tokens = hold_out(tokens, config)
    data_loader = MicroBatchDataLoader(train_tokens, config, device)
    eval_frequency, eval_steps = config.training.eval_frequency, config.training.eval_steps
    eval_loader = MicroBatchDataLoader(eval_tokens, config, device, shuffle=False) if eval_frequency else None

    # The model, and around it what makes it parallel.
    model = DataParallelBucket(build_model(config, model_config, device, dtype))

    # Training.
    tensor_shapes = hidden_states_shape(config, model_config)
    take_step = pick_train_step(config, tensor_shapes, device, dtype)
    eval_loss = functools.partial(evaluate, model, eval_loader, eval_steps, tensor_shapes, device, dtype)
    optimizer = AdamW(model.parameters(), config.training, config.model.use_fused_adam)
    scheduler = make_scheduler(optimizer, config.training)
    metrics = Metrics(config, model_config, device, dtype)
    logger.info("%s | %s parameters, %s on %s", grid, f"{metrics.parameters:,}", config.model.dtype, device)
    logger.info(
        "%s tokens of %s, %s per step", f"{len(train_tokens):,}", config.dataset.name, f"{metrics.tokens_per_step:,}"
    )

    step = 0
    max_tokens = config.training.max_tokens or math.inf
    while step < config.training.total_train_steps and step * metrics.tokens_per_step < max_tokens:
        loss = take_step(model, data_loader)
        grad_norm = clip_grad_norm(model, config.training.max_grad_norm)
        learning_rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        evaluate_now = eval_frequency > 0 and step % eval_frequency == 0
        metrics.log(step, loss, grad_norm, learning_rate, eval_loss if evaluate_now else None)

    metrics.close()
    guess = math.log(model_config.vocab_size)
    logger.info("loss %.4f -> %.4f (a uniform guess has %.4f)", metrics.first_loss, metrics.last_loss, guess)
    logger.info("config.json and metrics.jsonl are in %s", Path(config.checkpoint.save_dir).resolve())
    dist.destroy_process_group()


def build_model(
    config: Config, model_config: LlamaConfig, device: torch.device, dtype: torch.dtype
) -> PipelineParallel:
    """This rank's part of a Llama with its initial or pretrained weights.

    It is built on the meta device first, a description without memory, so that each process only ever holds what is
    its own.
    """
    attend = fused_attention if config.model.use_flash_attention else math_attention
    with torch.device("meta"):
        llama = Llama(model_config, attend, config.training.activation_checkpointing == "full").to(dtype)
        llama = apply_tensor_parallel(llama, config.distributed.sequence_parallel)
        stage = PipelineParallel(llama, config.training.seq_length)  # what llama has left
        apply_context_parallel(stage, config.distributed)
    initial = initial_value(model_config, config.training.seed)
    materialise(llama, device, pretrained_value(config.model.name) if config.model.pretrained else initial)
    if config.training.compile:
        for layer in llama.model.layers.values():
            layer.compile()
    return stage


if __name__ == "__main__":
    exit_on_error(main)
