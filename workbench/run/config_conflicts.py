"""Conflicts between keys of the config. (The type of a key in `config` sets the limits of its own values.)"""

import math
from collections.abc import Iterator

from picotron.config import Config


def conflicts(config: Config) -> Iterator[str]:
    """Yield one sentence for each conflict, with the values and the remedy."""
    layout, model, training, dataset = config.distributed, config.model, config.training, config.dataset
    steps, warmup, decay = training.total_train_steps, training.warmup_steps, training.decay
    trace_steps = config.logging.trace_steps or []

    if layout.backend == "nccl" and layout.use_cpu:
        yield "distributed.backend='nccl' needs GPUs, but use_cpu=true; set backend to 'gloo' or null"
    if layout.backend == "gloo" and not layout.use_cpu and max(layout.pp_size, layout.cp_size) > 1:
        yield (
            f"distributed.backend='gloo' cannot send from GPU to GPU, which pp_size={layout.pp_size} with "
            f"cp_size={layout.cp_size} requires; set backend to null, or use_cpu to true"
        )

    if layout.dp_size * layout.cp_size % layout.ep_size:
        yield (
            f"distributed.ep_size={layout.ep_size} does not divide dp_size={layout.dp_size} times cp_size="
            f"{layout.cp_size}, whose ranks share the experts; use a divisor of {layout.dp_size * layout.cp_size}"
        )
    if layout.ep_size > 1 and config.logging.sample_prompt:
        yield (
            f"logging.sample_prompt generates with distributed.ep_size=1, not {layout.ep_size}: ranks that generate wait "
            f"for no others; remove the prompt"
        )

    if warmup >= steps:
        yield f"training.warmup_steps={warmup} must be less than total_train_steps={steps}; use at most {steps - 1}"
    if training.decay_steps and training.lr_scheduler != "wsd":
        yield f"training.decay_steps={decay} is for lr_scheduler='wsd', not {training.lr_scheduler!r}; remove it"
    if training.lr_scheduler == "wsd" and warmup < steps < warmup + decay:
        yield (
            f"training.warmup_steps={warmup} and the {decay} decay_steps exceed total_train_steps={steps}; set "
            f"decay_steps to at most {steps - warmup}"
        )
    if training.eval_frequency > steps:
        yield (
            f"training.eval_frequency={training.eval_frequency} exceeds total_train_steps={steps}, so no evaluation "
            f"would run; use at most {steps}, or 0 for no evaluation"
        )

    if dataset.eval_name and not training.eval_frequency:
        yield f"dataset.eval_name={dataset.eval_name!r} needs evaluations, but training.eval_frequency=0; set it, or remove the name"
    if dataset.eval_name in dataset.weights and dataset.eval_split in (None, dataset.split):
        yield (
            f"dataset.eval_name={dataset.eval_name!r} is a data set to train on, too; set eval_split to another split, or "
            f"remove the name (rows that are not trained on are then evaluated)"
        )
    if config.checkpoint.keep_best and not (training.eval_frequency and config.checkpoint.keep_last):
        yield (
            f"checkpoint.keep_best=true needs evaluations and old checkpoints to delete, but training.eval_frequency="
            f"{training.eval_frequency} and checkpoint.keep_last={config.checkpoint.keep_last}; set both, or remove the key"
        )
    if config.logging.sample_prompt and not training.eval_frequency:
        yield "logging.sample_prompt needs evaluations, but training.eval_frequency=0; set it, or remove the prompt"
    if config.logging.sample_prompt and layout.dp_engine == "zero3":
        yield "logging.sample_prompt needs weights in memory, which distributed.dp_engine='zero3' frees; change one"
    if dataset.eval_split and not dataset.eval_name:
        yield f"dataset.eval_split={dataset.eval_split!r} is a split of dataset.eval_name, which is null; set it, or remove the split"

    columns = dataset.columns
    if set(columns) not in ({"text_column"}, {"prompt_column", "completion_column"}, {"messages_column"}):
        given = " and ".join(f"{key}={column!r}" for key, column in columns.items())
        yield f"dataset: set text_column, or prompt_column and completion_column, or messages_column, not {given}"
    elif len(set(columns.values())) < len(columns):
        yield f"dataset: prompt_column and completion_column are both {dataset.prompt_column!r}; choose two columns"
    elif dataset.messages_column == "tools":
        yield "dataset.messages_column='tools', but this column has the tools of a chat; rename the column"
    if dataset.assistant_turns == "last" and not dataset.has_samples:
        yield "dataset.assistant_turns='last' is for conversations, but the data set is text; remove it"
    if not dataset.add_start_token and dataset.messages_column:
        yield "dataset.add_start_token=false has no effect on conversations, which the chat template begins; remove it"
    if dataset.long_samples and not dataset.has_samples:
        yield (
            f"dataset.long_samples={dataset.long_samples!r} is for samples, but the data set is text, without "
            f"prompt_column or messages_column; remove it"
        )

    divisors = {}  # of seq_length
    if layout.cp_size > 1:
        shards = 2 * layout.cp_size if layout.cp_sharding == "zigzag" else layout.cp_size
        divisors[f"cp_size={layout.cp_size} with cp_sharding={layout.cp_sharding!r}"] = shards
    if layout.sequence_parallel:
        divisors[f"sequence_parallel with tp_size={layout.tp_size}"] = layout.cp_size * layout.tp_size
    multiple = math.lcm(*divisors.values())
    if training.seq_length % multiple:
        below = training.seq_length // multiple * multiple
        yield (
            f"training.seq_length={training.seq_length} is not divisible by {multiple}, as {' and '.join(divisors)} "
            f"{'requires' if len(divisors) == 1 else 'require'}; use {f'{below} or ' if below else ''}{below + multiple}"
        )
    if layout.cp_size > 1 and layout.cp_engine != "ulysses":
        if not model.use_flash_attention:
            yield (
                f"distributed.cp_engine={layout.cp_engine!r} needs fused attention, but model.use_flash_attention=false; "
                f"set that to true, or cp_engine to 'ulysses'"
            )
        if model.dtype == "float64" and not layout.use_cpu:
            yield (
                f"distributed.cp_engine={layout.cp_engine!r} has no kernel for model.dtype='float64' on GPUs; "
                f"use model.dtype='float32', cp_engine='ulysses' or use_cpu=true"
            )

    if training.optimizer_states != "float32" and model.dtype != "bfloat16":
        yield (
            f"training.optimizer_states={training.optimizer_states!r} is for model.dtype='bfloat16', not {model.dtype!r}; "
            f"remove it"
        )
    if model.float8 and model.dtype in ("float16", "float64"):
        yield f"model.float8=true rounds the products of model.dtype={model.dtype!r}; use dtype='bfloat16'"
    if trace_steps and layout.pp_size == 1:
        yield f"logging.trace_steps={trace_steps} needs a pipeline, but pp_size=1; remove it"
    if max(trace_steps, default=0) > steps:
        yield f"logging.trace_steps={trace_steps} exceeds total_train_steps={steps}; use steps up to {steps}"
