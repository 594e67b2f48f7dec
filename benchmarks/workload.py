"""The workload that all benchmarks share: one model for each kind of device, and a training step of each trainer.

On a GPU, the model has the shape of SmolLM-1.7B; with `--tiny`, every benchmark runs in seconds, to test it.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from conformance.adapters.loop import whole
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader, TextRows
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.weights import initial_weights
from picotron.optimizer import AdamW, update_weights
from picotron.pipeline_parallel.pipeline_parallel import Step
from picotron.process_group_manager import setup_process_group_manager
from workbench.console import number
from workbench.pipelines.engine import make_train_step, plan_pipeline
from workbench.run.config_reader import parse_config
from workbench.run.launch import keep_freed_memory
from workbench.run.metrics import global_mean
from workbench.variants.choose import build_model

ON_GPU = torch.cuda.is_available()
TINY = "--tiny" in sys.argv  # also in the processes that a benchmark starts: they have its arguments
KIND = "tiny" if TINY else "GPU" if ON_GPU else "CPU"
SHAPE: dict[str, Any] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128,
             "initializer_range": 0.2},  # large, so that a mistake changes the loss
    "GPU": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152},
    "CPU": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096},
}[KIND]  # fmt: skip
LAYERS: int = SHAPE["num_hidden_layers"]
SEQ_LENGTH, MICRO_BATCH, MICRO_BATCHES = {"tiny": (32, 2, 4), "GPU": (2048, 4, 4), "CPU": (512, 2, 4)}[KIND]


def model_config(layers: int = LAYERS, seq_length: int = SEQ_LENGTH, tied: bool = KIND != "CPU") -> LlamaConfig:
    shape = SHAPE | {"num_hidden_layers": layers}
    return LlamaConfig(**shape, max_position_embeddings=seq_length, tie_word_embeddings=tied)


def run_config(layout: dict[str, Any], **training: Any) -> Config:
    """Return the config of the workload.

    Args:
        layout: keys of the config's section `distributed`.
        training: keys of its section `training`.
    """
    sizes = {"seq_length": SEQ_LENGTH, "micro_batch_size": MICRO_BATCH, "gradient_accumulation_steps": MICRO_BATCHES}
    return parse_config(
        {
            "distributed": {**layout, "use_cpu": not ON_GPU},
            "model": {"name": "benchmark", "dtype": "bfloat16" if ON_GPU else "float32"},
            "training": sizes | {"compile": False} | training,  # as the other trainers, which are not compiled
            "dataset": {"name": "random tokens"},
        }
    )


def device_of(rank: int) -> torch.device:
    if not ON_GPU:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def require_gpus(count: int) -> None:
    """End the program if this machine has GPUs, but fewer than a benchmark needs."""
    if ON_GPU and torch.cuda.device_count() < count:
        raise SystemExit(
            f"this benchmark needs {count} GPUs, but found {torch.cuda.device_count()}; "
            "set CUDA_VISIBLE_DEVICES='' to run it on the CPU"
        )


def loader_of(config: Config, device: torch.device) -> MicroBatchDataLoader:
    """Return picotron's data loader on random tokens, which every trainer uses."""
    count = config.training.seq_length * 256 + 1
    tokens = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=count).astype(np.uint16)
    return MicroBatchDataLoader(TextRows(tokens, config.training.seq_length), config, device)


def parts_of(config: Config, device: torch.device, dtype: torch.dtype, shape: LlamaConfig) -> tuple[Any, ...]:
    """Create the process groups, and return what this rank's part of the model is built from."""
    layout = config.distributed
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    return config, shape, plan_pipeline(config, shape).wrap, device, dtype, initial_weights(shape, config.training.seed)


def training_of(
    config: Config, device: torch.device, shape: LlamaConfig
) -> tuple[Step, DataParallel, MicroBatchDataLoader]:
    """Return this rank's training step and its arguments: the model and the data loader."""
    dtype = getattr(torch, config.model.dtype)
    model = build_model(*parts_of(config, device, dtype, shape))
    return make_train_step(config, plan_pipeline(config, shape), device, dtype), model, loader_of(config, device)


def picotron_step(
    rank: int, layout: dict[str, Any], shape: LlamaConfig | None = None, threads: int = 1, **training: Any
) -> Callable[[], Any]:
    """Return a step of picotron: forward and backward, clipping and optimizer. It returns the loss of all ranks.

    Args:
        layout, training: see `run_config`.
        threads: number of threads of the process.
    """
    torch.set_num_threads(threads)
    if not ON_GPU:
        keep_freed_memory()  # as train.py does
    config = run_config(layout, **training)
    train_step, model, loader = training_of(config, device_of(rank), shape or model_config())
    optimizer = AdamW(model, config.training, fused=True)

    def step() -> Tensor:
        loss = train_step(model, loader)
        update_weights(model, optimizer, 1.0)
        return global_mean(loss)

    return step


def transformers_step(
    rank: int, dp_size: int = 1, wrap: Callable[[Any], Any] = lambda model: model, optimizer: Any = None
) -> Callable[[], Any]:
    """Return a step of transformers' model, on a GPU under bfloat16 autocast.

    Args:
        wrap: function that returns the model as the step calls it, such as in DistributedDataParallel.
        optimizer: see `torch_adamw`.
    """
    device = device_of(rank)
    model = wrap(transformers_model(device, dp_size))
    loader = loader_of(run_config({"dp_size": dp_size}), device)

    def logits_of(batch: dict[str, Any]) -> Tensor:
        return model(input_ids=batch["input_ids"], use_cache=False).logits

    return torch_step(model, torch_adamw(model.parameters(), optimizer), loader, logits_of)


def transformers_model(device: torch.device, dp_size: int) -> Any:
    """Return transformers' model with picotron's initial weights, and create the data-parallel groups of the loader."""
    setup_process_group_manager(1, 1, 1, dp_size)
    with device:
        model = LlamaForCausalLM(model_config())
    read = initial_weights(model_config(), run_config({}).training.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name, parameter.shape, ()))
    return model


def torch_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: MicroBatchDataLoader,
    logits_of: Callable[[dict[str, Any]], Tensor],
    clip: Callable[[list[Any], float], Tensor] = torch.nn.utils.clip_grad_norm_,
) -> Callable[[], Any]:
    """Return a step of a model; in DistributedDataParallel, only the last micro-batch reduces gradients.

    Args:
        logits_of: function of a micro-batch without its targets.
        clip: see `train` of conformance/adapters/loop.py.
    """

    def step() -> Tensor:
        total_loss = torch.zeros(())
        for i in range(MICRO_BATCHES):
            batch = next(loader)
            targets = batch.pop("target_ids")
            accumulates = isinstance(model, DistributedDataParallel) and i < MICRO_BATCHES - 1
            with model.no_sync() if accumulates else contextlib.nullcontext():
                with torch.autocast(targets.device.type, torch.bfloat16, enabled=ON_GPU):
                    logits = logits_of(batch)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / MICRO_BATCHES
                loss.backward()
            total_loss = total_loss.to(loss.device) + whole(loss.detach())
        clip(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total_loss

    return step


def torch_adamw(parameters: Any, wrapper: Any = None) -> Any:
    """Return torch's optimizer with picotron's default hyperparameters (weights of norms do not decay), in
    ZeroRedundancyOptimizer if that is given.
    """
    arguments = {"lr": 3e-4, "betas": (0.9, 0.95), "fused": True}
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if wrapper is not None:
        return wrapper(groups, torch.optim.AdamW, **arguments)
    return torch.optim.AdamW(groups, **arguments)


def arguments(text: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    turns, steps = 1 if TINY else 3, 5 if ON_GPU and not TINY else 1
    parser.add_argument(
        "--turns", type=number(int, 1), default=turns, help=f"number of measurements of each variant; default: {turns}"
    )
    parser.add_argument(
        "--steps", type=number(int, 1), default=steps, help=f"number of steps per measurement; default: {steps}"
    )
    add_tiny(parser)
    return parser


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add the option that TINY reads."""
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences, to test the benchmark")
