"""The workload that benchmarks share: one model shape per kind of device, and a step of each trainer on it."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from picotron.config import Config
from picotron.config_reader import parse_config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket, DataParallelNaive
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.parallelize import build_model
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, hidden_states_shape
from picotron.process_group_manager import setup_process_group_manager
from picotron.schedules.plan import plan_pipeline
from picotron.train_step import make_train_step

ON_GPU = torch.cuda.is_available()
SHAPE = (  # on a GPU: the shape of SmolLM-1.7B
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152}
    if ON_GPU
    else {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
)  # fmt: skip
LAYERS = SHAPE["num_hidden_layers"]
SEQ_LENGTH, MICRO_BATCH, MICRO_BATCHES = (2048, 4, 4) if ON_GPU else (512, 2, 4)


def model_config(layers: int = LAYERS, seq_length: int = SEQ_LENGTH) -> LlamaConfig:
    shape = SHAPE | {"num_hidden_layers": layers}
    return LlamaConfig(**shape, max_position_embeddings=seq_length, tie_word_embeddings=ON_GPU)


def run_config(layout: dict[str, Any], **training: Any) -> Config:
    """The config of the workload; `layout` are keys of its section `distributed`, the others of `training`."""
    sizes = {"seq_length": SEQ_LENGTH, "micro_batch_size": MICRO_BATCH, "gradient_accumulation_steps": MICRO_BATCHES}
    return parse_config(
        {
            "distributed": {**layout, "use_cpu": not ON_GPU},
            "model": {"name": "benchmark", "dtype": "bfloat16" if ON_GPU else "float32"},
            "training": sizes | training,
            "dataset": {"name": "random tokens"},
        }
    )


def device_of(rank: int) -> torch.device:
    if not ON_GPU:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def loader_of(config: Config, device: torch.device) -> MicroBatchDataLoader:
    """Random tokens from the loader that training uses: the same work for everyone."""
    count = config.training.seq_length * 256 + 1
    tokens = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=count).astype(np.uint16)
    return MicroBatchDataLoader(tokens, config, device)


def stage_of(config: Config, device: torch.device, dtype: torch.dtype, layers: int = LAYERS) -> PipelineParallel:
    """This rank's part of the model, as train.py builds it."""
    layout = config.distributed
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    shape = model_config(layers, config.training.seq_length)
    return build_model(config, shape, plan_pipeline(config, shape), device, dtype)


Step = Callable[[DataParallel, MicroBatchDataLoader], Tensor]


def training_of(
    config: Config, device: torch.device, wrapper: type[DataParallel] = DataParallelBucket, layers: int = LAYERS
) -> tuple[Step, DataParallel, MicroBatchDataLoader]:
    """This rank's training step, and what it takes: the wrapped model and the data."""
    dtype, shape = getattr(torch, config.model.dtype), model_config(layers, config.training.seq_length)
    stage = stage_of(config, device, dtype, layers)
    model = wrapper(stage, groups=stage.parameters_by_stage())
    plan, tensor_shapes = plan_pipeline(config, shape), hidden_states_shape(config, shape)
    return make_train_step(config, plan, tensor_shapes, device, dtype), model, loader_of(config, device)


def ours(
    rank: int, layout: dict[str, Any], wrapper: str = "bucket", layers: int = LAYERS, threads: int = 1, **training: Any
) -> Callable[[], Any]:
    """A step of picotron: its own training step, clipping and optimizer; see `run_config`."""
    torch.set_num_threads(threads)
    device, config = device_of(rank), run_config(layout, **training)
    wrap = {"bucket": DataParallelBucket, "naive": DataParallelNaive}[wrapper]
    take_step, model, loader = training_of(config, device, wrap, layers)
    optimizer = AdamW(model.parameters(), config.training, fused=True)

    def step() -> None:
        take_step(model, loader)
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def theirs(rank: int, dp_size: int, ddp: bool, compiled: bool = False) -> Callable[[], Any]:
    """A step of transformers' model in a plain loop, or in DistributedDataParallel; on a GPU under bf16 autocast."""
    device, config = device_of(rank), run_config({"dp_size": dp_size})
    setup_process_group_manager(1, 1, 1, dp_size)
    with device:
        model: Any = LlamaForCausalLM(model_config())
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    if ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loader = loader_of(config, device)

    def step() -> None:
        for i in range(MICRO_BATCHES):
            batch = next(loader)
            ids, targets = batch["input_ids"], batch["target_ids"]
            last = i == MICRO_BATCHES - 1
            with nothing() if last or not ddp else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=ON_GPU):
                    logits = model(input_ids=ids, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / MICRO_BATCHES
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def arguments(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5 if ON_GPU else 1, help="per turn")
    return parser
