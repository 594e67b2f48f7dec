"""Train a Llama-like model:  torchrun --nproc_per_node 8 train.py --config template/base_config.json

This file is the story of a run, told from top to bottom. Each chapter is a file of the package:
config -> data -> process groups -> model -> parallelism -> optimizer -> steps.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from picotron.check import check_layout
from picotron.checkpoint import Checkpoint, find_checkpoint
from picotron.checkpoint_writer import CheckpointWriter
from picotron.config import Config, check_world_size
from picotron.config_reader import load_config
from picotron.context_parallel.context_parallel import apply_context_parallel
from picotron.data import MicroBatchDataLoader, Progress, hold_out, order_of_samples
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.explain import explain
from picotron.metrics import Metrics
from picotron.model import Llama, fused_attention, load_model_config, math_attention
from picotron.optimizer import AdamW, clip_grad_norm, make_scheduler
from picotron.pipeline_parallel.executor import pick_evaluation, pick_pipeline_step
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, hidden_states_shape
from picotron.pipeline_parallel.plan import Plan
from picotron.pipeline_parallel.recorder import record_steps
from picotron.process_group_manager import setup_process_group_manager
from picotron.run_folder import check_save_dir
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.tokens import load_tokens
from picotron.utils import StopSignals, exit_on_error, init_process_group, set_up_device, set_up_logging
from picotron.weights import initial_value, materialise


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
    config: Config, plan: Plan, tensor_shapes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Callable[[DataParallel, MicroBatchDataLoader], torch.Tensor]:
    """The training step that a config asks for."""
    if config.distributed.pp_size == 1:
        return functools.partial(train_step, device=device)
    return pick_pipeline_step(config, plan, tensor_shapes, device, dtype)


def main() -> None:
    set_up_logging()

    # What to do. Mistakes are found here, before anything expensive starts.
    config = load_config(sys.argv[1:])
    if "--explain" in sys.argv:
        return explain(config, build_model, pick_train_step)
    logging.getLogger("picotron.pipeline").setLevel(config.logging.level.upper())
    layout, training = config.distributed, config.training
    check_world_size(layout, int(os.environ.get("WORLD_SIZE", 1)))
    check_save_dir(config)
    device, dtype = set_up_device(config), getattr(torch, config.model.dtype)
    model_config = load_model_config(config.model)
    plan = check_layout(config, model_config)

    # The grid of processes.
    init_process_group(config, device)
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    if layout.pp_size > 1:
        logging.getLogger("picotron").info("%s", plan)

    # Where to begin, and the data: tokenised by one process, memory-mapped by all.
    checkpoint = find_checkpoint(config, model_config)
    tokens, tokenizer = load_tokens(config, model_config)
    train_tokens, eval_tokens = hold_out(tokens, config)
    order = order_of_samples(train_tokens, config)
    progress = checkpoint.progress(order) if checkpoint else Progress()
    data_loader = MicroBatchDataLoader(train_tokens, config, device, progress.samples)
    eval_loader = MicroBatchDataLoader(eval_tokens, config, device, shuffle=False) if len(eval_tokens) > 1 else None

    # The model, and around it what makes it parallel.
    stage = build_model(config, model_config, plan, device, dtype, checkpoint)
    model = DataParallelBucket(stage, groups=stage.parameters_by_stage())

    # How it learns, what is told and kept of it.
    tensor_shapes = hidden_states_shape(config, model_config)
    take_step = pick_train_step(config, plan, tensor_shapes, device, dtype)
    take_step = record_steps(take_step, config, device, progress.step)
    eval_loss = functools.partial(pick_evaluation(config, plan, tensor_shapes, device, dtype), model, eval_loader)
    optimizer = AdamW(model.parameters(), training, config.model.use_fused_adam)
    if checkpoint:
        checkpoint.restore(optimizer, stage.module)
    scheduler = make_scheduler(optimizer, training, progress.step)
    metrics = Metrics(config, model_config, device, dtype, checkpoint)
    writer = CheckpointWriter(config, model_config, stage.module, optimizer, tokenizer, order, metrics.wandb_run_id)

    signals, stop = StopSignals(), 0
    with writer:
        while not stop and not progress.is_end(training):
            metrics.start_step()
            loss = take_step(model, data_loader)
            grad_norm = clip_grad_norm(model, training.max_grad_norm)
            learning_rate = float(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress = progress.after_step(config)
            metrics.log(progress, loss, grad_norm, learning_rate, eval_loss)
            stop = signals.agreed()
            writer.after_step(progress, stop)

    metrics.close()
    dist.barrier()  # torchrun ends everyone when the first process leaves with an exit code
    dist.destroy_process_group()
    if stop:
        sys.exit(128 + stop)  # what a shell says of a program that a signal ended


def build_model(
    config: Config,
    model_config: LlamaConfig,
    plan: Plan,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Checkpoint | None = None,
) -> PipelineParallel:
    """This rank's part of a Llama with its initial weights, or those of a checkpoint.

    Built on the meta device first, a description without memory: each process only ever holds what is its own.
    """
    attend = fused_attention if config.model.use_flash_attention else math_attention
    with torch.device("meta"):
        llama = Llama(model_config, attend, config.training.activation_checkpointing == "full").to(dtype)
        llama = apply_tensor_parallel(llama, config.distributed.sequence_parallel)
        stage = PipelineParallel(llama, plan)  # what llama has left
        apply_context_parallel(stage, config.distributed)
    initial = checkpoint.weights() if checkpoint else initial_value(model_config, config.training.seed)
    materialise(llama, device, initial)
    for layer in llama.model.layers.values() if config.training.compile else ():
        layer.compile()
    return stage


if __name__ == "__main__":
    exit_on_error(main)
