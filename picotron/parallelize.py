"""Build this rank's part of a Llama: the four parallelisms, one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from picotron.config import Config
from picotron.context_parallel.context_parallel import apply_context_parallel
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.cross_entropy import chunk_loss
from picotron.model.families import differences
from picotron.model.llama import Llama, fused_attention
from picotron.model.weights import ReadTensor, materialise
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel


def build_stage(
    config: Config,
    model_config: PreTrainedConfig,
    pipeline: Callable[[Llama], PipelineParallel],
    device: torch.device,
    dtype: torch.dtype,
    weights: ReadTensor | None,
) -> PipelineParallel:
    """Build this rank's part of a Llama, without data parallelism, which only training needs.

    The model is first built on the meta device, where parameters have shapes but no memory, and the layers and shards
    of other ranks are removed there. So a rank never allocates more than its own part.

    Args:
        pipeline: function that keeps this rank's part of the layers, such as `partial(PipelineParallel, stage=stage)`.
        weights: function that reads the weights, or None, see `materialise`.
    """
    with torch.device("meta"):
        llama = Llama(model_config, fused_attention, config.training.activation_checkpointing == "full").to(dtype)
        llama = apply_tensor_parallel(llama, config.distributed.sequence_parallel)  # replaces layers by their shards
        apply_context_parallel(llama, config.distributed)  # swaps the attention function
        stage = pipeline(llama)  # removes other stages' layers
    materialise(llama, device, weights)
    return stage


def build_model(
    config: Config,
    model_config: PreTrainedConfig,
    pipeline: Callable[[Llama], PipelineParallel],
    device: torch.device,
    dtype: torch.dtype,
    weights: ReadTensor,
) -> DataParallelBucket:
    """Build this rank's part of a Llama, ready for a training step. Arguments: see `build_stage`.

    A config that names other algorithms, or a model with experts, needs `build_model` of workbench/variants/choose.py.
    """
    assert not config.needs_variants
    assert not differences(model_config).experts
    stage = build_stage(config, model_config, pipeline, device, dtype, weights)
    if config.compiles:
        compile_model(unwrap(stage))
    return DataParallelBucket(stage)  # adds gradient buffers and hooks


def compile_model(llama: Llama) -> None:
    """Apply torch.compile to each decoder layer, and to the softmax of the loss."""
    for layer in llama.model.layers.values():
        layer.forward = torch.compile(layer.forward)  # without the module's hooks, which gather weights with zero3
    head: Any = llama.lm_head
    if head is not None:
        head.compute_chunk = torch.compile(chunk_loss)


def unwrap(model: nn.Module) -> Llama:
    """Return the `Llama` inside the wrappers of `build_stage` and `build_model`."""
    return next(module for module in model.modules() if isinstance(module, Llama))
