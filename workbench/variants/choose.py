"""The table of variants: other algorithms for what picotron/ does, each of which a key of the config selects.

Each function here has the name of a function of picotron/ or of `run`, and does the same if the config names no
variant. A variant is imported only where the config names it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron import optimizer as optimizer_module
from picotron import parallelize
from picotron.config import Config
from picotron.context_parallel.context_parallel import RingAttention, visible_blocks
from picotron.data.loader import Rows
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket, DataParallelNaive
from picotron.model.families import differences
from picotron.model.llama import AttentionFn, Llama, fused_attention
from picotron.model.weights import ReadTensor, read_owned_weights
from picotron.optimizer import AdamW
from picotron.parallelize import compile_model, unwrap
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from workbench.run import rows as run_rows
from workbench.run.token_files import Samples, Text
from workbench.variants.packed import PackedDocuments, limit_to_documents, math_attention, packed_attention


def attention(config: Config) -> AttentionFn:
    """Return the attention function of q, k, v and, in rows that hold several documents, `documents`: of the keys
    `use_flash_attention` and `cp_engine`.
    """
    layout = config.distributed
    within = fused_attention if config.model.use_flash_attention else math_attention

    def attend_here(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        return within(q, k, v) if documents is None else packed_attention(q, k, v, documents, within)

    if layout.cp_size == 1:
        return attend_here
    if layout.cp_engine == "ulysses":
        from workbench.variants.ulysses import ulysses_attention

        ulysses = functools.partial(ulysses_attention, sharding=layout.cp_sharding, attention_fn=attend_here)
        return torch.compiler.disable(ulysses)
    function: Any = RingAttention
    if layout.cp_engine == "all_gather":
        from workbench.variants.all_gather import AllGatherAttention

        function = AllGatherAttention

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        blocks_of: Any = functools.partial(visible_blocks, sharding=layout.cp_sharding)
        if documents is not None:
            from workbench.variants.packed_blocks import packed_blocks

            blocks_of = functools.partial(packed_blocks, sharding=layout.cp_sharding, documents=documents)
        return function.apply(q, k, v, blocks_of)

    return torch.compiler.disable(attend)


def build_stage(
    config: Config, model_config: PreTrainedConfig, pipeline: Callable[[Llama], PipelineParallel], *others: Any
) -> PipelineParallel:
    """Build this rank's part of a Llama, see `parallelize.build_stage`, with the variants of attention and of the key
    `activation_checkpointing`, and with the experts of the model.
    """
    keep = pipeline
    if differences(model_config).experts:
        from workbench.variants.experts import put_experts

        def keep(llama: Llama) -> PipelineParallel:
            return pipeline(put_experts(llama, config.distributed, config.training.router_bias_rate))

    stage = parallelize.build_stage(config, model_config, keep, *others)
    llama = unwrap(stage)
    llama.attention_fn = attention(config)
    llama.register_forward_pre_hook(limit_to_documents, with_kwargs=True)
    if config.training.activation_checkpointing == "selective":
        from workbench.variants.recompute import recompute_cheap_results

        recompute_cheap_results(llama, config.distributed.tp_size > 1 or stage.splits_backward)
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
    """Build this rank's part of a Llama for training, see `parallelize.build_model`, with the variants of `build_stage`
    and of the keys `float8` and `dp_engine`.

    Args:
        frozen: function of a parameter's name, which returns whether training leaves the parameter as it is.
    """
    engine = config.distributed.dp_engine
    stage = build_stage(config, model_config, pipeline, device, dtype, weights if engine != "zero3" else None)
    llama = unwrap(stage)
    for name, parameter in llama.named_parameters():  # before wrapping: frozen ones get no gradient buffers
        parameter.requires_grad_(parameter.requires_grad and not frozen(name))
    if config.model.float8:
        from workbench.variants.float8 import use_float8

        use_float8(llama)
    if config.compiles:
        compile_model(llama)
    if engine == "zero3":
        from workbench.variants.zero3 import DataParallelZero3

        model = DataParallelZero3(stage, units_of(llama))
        read_owned_weights(llama, weights)
        return model
    if engine == "zero1":
        from workbench.variants.zero1 import DataParallelZero1

        return DataParallelZero1(stage)
    return {"naive": DataParallelNaive, "bucket": DataParallelBucket}[engine](stage)


def units_of(llama: Llama) -> list[list[nn.Module]]:
    """Return the modules whose weights ZeRO-3 gathers together: the embedding; each layer; the last norm and the head,
    which is not always called, but runs after the norm.
    """
    decoder: Any = llama.model
    groups = [decoder.embed_tokens], *([layer] for layer in decoder.layers.values()), [decoder.norm, llama.lm_head]
    return [[each for each in group if each is not None] for group in groups]


def make_optimizer(model: DataParallel, config: Config) -> AdamW:
    """Return the optimizer of the keys `optimizer_states` and `dtype`."""
    if config.model.dtype == "float16":
        from workbench.variants.float16 import Float16AdamW

        return Float16AdamW(model, config.training, config.model.use_fused_adam)
    if config.training.optimizer_states == "float32":
        return optimizer_module.make_optimizer(model, config)
    from workbench.variants.bfloat16_states import BFloat16AdamW

    return BFloat16AdamW(model, config.training, config.model.use_fused_adam)


def update_weights(model: DataParallel, optimizer: AdamW, max_norm: float | None) -> Tensor:
    """Clip the gradients and update the weights, with the loss scale of the optimizer, if it has one."""
    from workbench.variants import float16

    if isinstance(optimizer, float16.Float16AdamW):
        return float16.update_weights(model, optimizer, max_norm)
    return optimizer_module.update_weights(model, optimizer, max_norm)


def split_train_eval(
    data: Text | Samples, config: Config, evaluation: Text | Samples | None = None
) -> tuple[Rows, Rows]:
    """Return the rows for training and for evaluations, see `run.rows.hold_out`: of text, perhaps with masked
    documents, or of samples.

    Args:
        evaluation: a data set for evaluations, of which each target counts once; by default, rows of `data`.
    """
    from workbench.variants.whole import MaskedRows, whole_rows

    length = config.training.seq_length
    if isinstance(data, Text):
        rows: Rows = MaskedRows(data.tokens, length, data.end)
        summary, unit = run_rows.summary_of(data, config), length
    else:
        from workbench.variants.samples import pack_samples

        drops_long = config.dataset.long_samples == "drop"
        packed = pack_samples(data, length, drops_long, config.dataset.masks_documents)
        too_long = ", or they are longer" if drops_long else ""
        why = f" (the loss counts none of their first {length + 1:,} tokens{too_long})" if packed.dropped else ""
        rows, unit = packed.rows, 1
        summary = (
            f"{len(data.lengths):,} samples in {run_rows.title_of(config.dataset)}, {packed.cut:,} cut and {packed.dropped:,} "
            f"dropped{why}; {len(packed.rows):,} rows of {length:,} tokens, {packed.empty:.1%} empty"
        )
    trained, held = run_rows.hold_out(rows, summary, config, unit)
    return trained, held if evaluation is None else whole_rows(evaluation, config, config.dataset.eval_name or "")
