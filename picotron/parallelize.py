"""Build this rank's part of a Llama: the four parallelisms, one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from picotron.config import Config
from picotron.context_parallel.context_parallel import apply_context_parallel
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket, DataParallelNaive
from picotron.model.cross_entropy import chunk_loss
from picotron.model.llama import Llama, fused_attention, math_attention
from picotron.model.weights import ReadTensor, materialise, read_owned_weights
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
    attention_fn = fused_attention if config.model.use_flash_attention else math_attention
    with torch.device("meta"):
        llama = Llama(model_config, attention_fn, config.training.activation_checkpointing == "full").to(dtype)

        # Replaces layers by their shards. (The overlapped form computes its products by itself, and not in float8.)
        llama = apply_tensor_parallel(llama, config.distributed.sequence_parallel, not config.model.float8)
        apply_context_parallel(llama, config.distributed)  # swaps the attention function
        stage = pipeline(llama)  # removes other stages' layers
    if config.training.activation_checkpointing == "selective":
        from picotron.model.recompute import recompute_cheap_results

        recompute_cheap_results(llama, config.distributed.tp_size > 1 or stage.splits_backward)
    materialise(llama, device, weights)
    return stage


def build_model(
    config: Config,
    model_config: PreTrainedConfig,
    pipeline: Callable[[Llama], PipelineParallel],
    device: torch.device,
    dtype: torch.dtype,
    weights: ReadTensor,
    frozen: Callable[[str], bool] = lambda name: False,
) -> DataParallel:
    """Build this rank's part of a Llama, ready for a training step.

    Args:
        config, model_config, pipeline, device, dtype, weights: see `build_stage`.
        frozen: function of a parameter's name, which returns whether training leaves the parameter as it is.
    """
    layout, whole = config.distributed, config.distributed.dp_engine != "zero3"
    stage = build_stage(config, model_config, pipeline, device, dtype, weights if whole else None)
    for name, parameter in unwrap(stage).named_parameters():  # before wrapping: frozen ones get no gradient buffers
        parameter.requires_grad_(not frozen(name))
    if config.model.float8:
        from picotron.model.float8 import use_float8

        use_float8(unwrap(stage))
    if config.compiles:
        compile_model(unwrap(stage))
    if not whole:
        from picotron.data_parallel.zero3 import DataParallelZero3

        model = DataParallelZero3(stage, units_of(unwrap(stage)))
        read_owned_weights(unwrap(stage), weights)
        return model
    if layout.dp_engine == "zero1":
        from picotron.data_parallel.zero1 import DataParallelZero1

        return DataParallelZero1(stage)
    wrap = {"naive": DataParallelNaive, "bucket": DataParallelBucket}[layout.dp_engine]
    return wrap(stage)  # adds gradient buffers and hooks


def units_of(llama: Llama) -> list[list[nn.Module]]:
    """Return the modules whose weights ZeRO-3 gathers together: the embedding; each layer; the last norm and the head,
    which is not always called, but runs after the norm.
    """
    decoder: Any = llama.model
    groups = [decoder.embed_tokens], *([layer] for layer in decoder.layers.values()), [decoder.norm, llama.lm_head]
    return [[each for each in group if each is not None] for group in groups]


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
