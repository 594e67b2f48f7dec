"""Conflicts between keys of the config. (The type of a key in `config` sets the limits of its own values.)

A check is a function that raises a UserError for one conflict; CHECKS lists all checks. `parse_config` calls each of
them, even if other keys are invalid, so that the user sees all mistakes at once. A check that reads an invalid value
ends there with InvalidValue, and the error of that value is reported instead.
"""

import functools
import math
from collections.abc import Callable

from picotron.config import Config
from picotron.console import UserError


def check_backend(config: Config) -> None:
    if config.distributed.backend == "nccl" and config.distributed.use_cpu:
        raise UserError("distributed.backend='nccl' needs GPUs, but use_cpu=true; set backend to 'gloo' or null")


def check_backend_on_gpus(config: Config) -> None:
    layout = config.distributed
    if layout.backend == "gloo" and not layout.use_cpu and max(layout.pp_size, layout.cp_size) > 1:
        raise UserError(
            f"distributed.backend='gloo' cannot send from GPU to GPU, which pp_size={layout.pp_size} with "
            f"cp_size={layout.cp_size} requires; set backend to null, or use_cpu to true"
        )


def check_pipeline_key(key: str, config: Config) -> None:
    """Refuse a key that has no effect without a pipeline, unless it has the value of a pipeline of one rank."""
    value = getattr(config.distributed, key)
    if config.distributed.pp_size == 1 and value not in (None, 0, 1):
        raise UserError(f"distributed.{key}={value!r} needs a pipeline, but pp_size=1; remove it")


def check_search_key(key: str, config: Config) -> None:
    value, engine = getattr(config.distributed, key), config.distributed.pp_engine
    if value is not None and engine != "auto":
        raise UserError(f"distributed.{key}={value!r} is for pp_engine='auto', not {engine!r}; remove it")


def check_group_size(config: Config) -> None:
    size, engine = config.distributed.pp_group_size, config.distributed.pp_engine
    if size is not None and (engine == "auto" or engine.startswith("csv:")):
        raise UserError(f"distributed.pp_group_size={size} cannot be used with pp_engine={engine!r}; remove it")


def check_kept_activations(config: Config) -> None:
    keep, checkpointing = config.distributed.pp_keep_activations, config.training.activation_checkpointing
    if keep and checkpointing != "full":
        raise UserError(
            f"distributed.pp_keep_activations={keep} needs training.activation_checkpointing='full', not "
            f"{checkpointing!r}, with which no whole layers are recomputed; remove one of them"
        )


def check_warmup(config: Config) -> None:
    warmup, steps = config.training.warmup_steps, config.training.total_train_steps
    if warmup >= steps:
        raise UserError(
            f"training.warmup_steps={warmup} must be less than total_train_steps={steps}; use at most {steps - 1}"
        )


def check_decay(config: Config) -> None:
    training = config.training
    warmup, decay, steps = training.warmup_steps, training.decay, training.total_train_steps
    if training.decay_steps and training.lr_scheduler != "wsd":
        raise UserError(
            f"training.decay_steps={decay} is for lr_scheduler='wsd', not {training.lr_scheduler!r}; remove it"
        )
    if training.lr_scheduler == "wsd" and warmup < steps < warmup + decay:
        raise UserError(
            f"training.warmup_steps={warmup} and the {decay} decay_steps exceed total_train_steps={steps}; set decay_steps to "
            f"at most {steps - warmup}"
        )


def check_evaluation(config: Config) -> None:
    frequency, steps = config.training.eval_frequency, config.training.total_train_steps
    if frequency > steps:
        raise UserError(
            f"training.eval_frequency={frequency} exceeds total_train_steps={steps}, so no evaluation would run; use at "
            f"most {steps}, or 0 for no evaluation"
        )


def check_columns(config: Config) -> None:
    columns = config.dataset.columns
    if set(columns) not in ({"text_column"}, {"prompt_column", "completion_column"}, {"messages_column"}):
        given = " and ".join(f"{key}={column!r}" for key, column in columns.items())
        raise UserError(
            f"dataset: set text_column, or prompt_column and completion_column, or messages_column, not {given}"
        )
    if len(set(columns.values())) < len(columns):
        raise UserError(
            f"dataset: prompt_column and completion_column are both {config.dataset.prompt_column!r}; choose two columns"
        )
    if columns.get("messages_column") == "tools":
        raise UserError("dataset.messages_column='tools', but this column has the tools of a chat; rename the column")


def check_long_samples(config: Config) -> None:
    if config.dataset.long_samples and not config.dataset.has_samples:
        raise UserError(
            f"dataset.long_samples={config.dataset.long_samples!r} is for samples, but the data set is text; remove it"
        )


def check_seq_length(config: Config) -> None:
    layout, length, needs = config.distributed, config.training.seq_length, {}
    if layout.cp_size > 1:
        needs[f"cp_size={layout.cp_size} with cp_sharding={layout.cp_sharding!r}"] = layout.cp_size * (
            2 if layout.cp_sharding == "zigzag" else 1
        )
    if layout.sequence_parallel:
        needs[f"sequence_parallel with tp_size={layout.tp_size}"] = layout.cp_size * layout.tp_size
    multiple = math.lcm(*needs.values())
    if length % multiple:
        below = length // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        verb = "requires" if len(needs) == 1 else "require"
        raise UserError(
            f"training.seq_length={length} is not divisible by {multiple}, as {' and '.join(needs)} {verb}; "
            f"use {nearest}"
        )


def check_fused_attention(config: Config) -> None:
    layout = config.distributed
    if layout.cp_size > 1 and layout.cp_engine != "ulysses" and not config.model.use_flash_attention:
        raise UserError(
            f"distributed.cp_engine={layout.cp_engine!r} needs fused attention, but model.use_flash_attention=false; "
            f"set that to true, or cp_engine to 'ulysses'"
        )


def check_attention_kernel(config: Config) -> None:
    layout = config.distributed
    if layout.cp_size > 1 and layout.cp_engine != "ulysses" and config.model.dtype == "float64" and not layout.use_cpu:
        raise UserError(
            f"distributed.cp_engine={layout.cp_engine!r} has no kernel for model.dtype='float64' on GPUs; "
            f"use model.dtype='float32', cp_engine='ulysses' or use_cpu=true"
        )


def check_float8(config: Config) -> None:
    if config.model.float8 and config.model.dtype == "float64":
        raise UserError("model.float8=true rounds the products of model.dtype='float64'; use dtype='bfloat16'")


def check_trace_steps(config: Config) -> None:
    steps = config.logging.trace_steps
    if steps and config.distributed.pp_size == 1:
        raise UserError(f"logging.trace_steps={steps} needs a pipeline, but pp_size=1; remove it")


def check_last_trace_step(config: Config) -> None:
    steps, total = config.logging.trace_steps or [], config.training.total_train_steps
    if max(steps, default=0) > total:
        raise UserError(f"logging.trace_steps={steps} exceeds total_train_steps={total}; use steps up to {total}")


CHECKS: list[Callable[[Config], None]] = [
    check_backend,
    check_backend_on_gpus,
    *(
        functools.partial(check_pipeline_key, key)
        for key in ("pp_chunks", "pp_group_size", "pp_max_activations", "pp_recording", "pp_keep_activations")
    ),
    *(functools.partial(check_search_key, key) for key in ("pp_max_activations", "pp_recording")),
    check_group_size,
    check_kept_activations,
    check_warmup,
    check_decay,
    check_evaluation,
    check_columns,
    check_long_samples,
    check_seq_length,
    check_fused_attention,
    check_attention_kernel,
    check_float8,
    check_trace_steps,
    check_last_trace_step,
]
