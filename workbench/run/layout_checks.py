"""Checks of a run before it starts: that the machine, the model and the layout fit together."""

import math
import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from picotron.config import Config, Distributed
from picotron.console import UserError
from picotron.model.families import differences, head_size
from picotron.pipeline_parallel.stages import plan_stages
from picotron.tensor_parallel.tensor_parallel import check_tensor_parallel
from workbench.run.launch import check_world_size
from workbench.run.metrics import check_wandb
from workbench.run.model_config import check_window, load_model_config

PlanPipeline = Callable[[Config, PreTrainedConfig], Any]


def check_all(*checks: Callable[[], Any]) -> Any:
    """Call each check, and return the result of the last one.

    Raises:
        UserError: the problems of all checks that raise one.
    """
    result, problems = None, list[str]()
    for check in checks:
        try:
            result = check()
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return result


def check_layout(config: Config, model_config: PreTrainedConfig, plan_pipeline: PlanPipeline = plan_stages) -> Any:
    """Check that the model can run in the config's layout, and return what `plan_pipeline` returns.

    Args:
        plan_pipeline: that of the workbench, if `config.needs_workbench`.

    Raises:
        UserError: some of the parallelisms do not fit the model.
    """
    layout, length = config.distributed, config.training.seq_length
    return check_all(
        lambda: check_tensor_parallel(model_config, layout.tp_size),
        lambda: check_window(model_config, length, f"training.seq_length={length}"),
        lambda: check_context_parallel(model_config, layout),
        lambda: check_float8(config, model_config),
        lambda: check_experts(model_config, layout, config.training.router_bias_rate),
        lambda: plan_pipeline(config, model_config),
    )


def check_context_parallel(config: PreTrainedConfig, layout: Distributed) -> None:
    """Raise UserError if `cp_engine` cannot run this model."""
    kv_heads = max(1, config.num_key_value_heads // layout.tp_size)  # per tp rank
    if layout.cp_engine == "ulysses" and kv_heads % layout.cp_size:
        raise UserError(
            f"cp_engine='ulysses' cannot split the {kv_heads} key/value heads of a tp rank (num_key_value_heads / tp_size) over "
            f"cp_size={layout.cp_size} ranks; use a cp_size that divides {kv_heads}, or cp_engine 'ring'"
        )
    uses_blocks = layout.cp_size > 1 and layout.cp_engine != "ulysses"
    if uses_blocks and not layout.use_cpu and (head_size(config) % 8 or head_size(config) > 256):
        raise UserError(
            f"cp_engine={layout.cp_engine!r} on GPUs needs a head_dim that is a multiple of 8 and at most 256, not "
            f"{head_size(config)}; use cp_engine 'ulysses' or use_cpu=true"
        )


def check_float8(config: Config, model: PreTrainedConfig) -> None:
    """Raise UserError if the config asks for float8, and its kernels do not support the sizes of the matrices."""
    tp = config.distributed.tp_size
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size / tp_size": model.intermediate_size / tp,
        "num_attention_heads * head_dim / tp_size": model.num_attention_heads * head_size(model) / tp,
    }
    wrong = ", ".join(f"{name}={size:g}" for name, size in sizes.items() if size % 16)
    if config.model.float8 and wrong:
        raise UserError(f"model.float8=true needs multiples of 16, not {wrong}; use other sizes, or float8=false")


def check_experts(config: PreTrainedConfig, layout: Distributed, bias_rate: float) -> None:
    """Raise UserError if experts cannot be split over the ep ranks, or their matrices over the tp ranks, or if routers
    have no bias for a rate.
    """
    experts, ep = differences(config).experts, layout.ep_size
    if ep > 1 and (experts is None or experts.number % ep):
        number = experts.number if experts else 0
        common = math.gcd(number or 1, layout.dp_size * layout.cp_size)
        remedy = f"a divisor of {common}" if common > 1 else "1"
        raise UserError(f"distributed.ep_size={ep} cannot split the model's {number} experts per layer; use {remedy}")
    if bias_rate and (experts is None or experts.scale is None):
        raise UserError(
            f"training.router_bias_rate={bias_rate:g} needs a model whose routers have a bias (model_type='dots1'), not "
            f"model_type={config.model_type!r}; set it to 0"
        )
    if experts is not None and experts.size % layout.tp_size:
        raise UserError(
            f"tp_size={layout.tp_size} does not divide {experts.size}, the intermediate size of an expert; use a divisor"
        )


def check_model(config: Config, plan_pipeline: PlanPipeline = plan_stages) -> tuple[PreTrainedConfig, Any]:
    """Load the model's config, and check that the model can run in the config's layout.

    Returns:
        The model's config, and what `plan_pipeline` returns.

    Raises:
        UserError: `load_model_config` or `check_layout` fails.
    """
    model_config = load_model_config(config.model)
    return model_config, check_layout(config, model_config, plan_pipeline)


def check_run(config: Config, plan_pipeline: PlanPipeline = plan_stages) -> tuple[PreTrainedConfig, Any]:
    """Check the number of processes, if torchrun has started them, wandb, and the model as `check_model` does."""
    layout = config.distributed
    return check_all(
        lambda: check_world_size(layout, int(os.environ.get("WORLD_SIZE", layout.world_size))),
        lambda: check_wandb(config),
        lambda: check_model(config, plan_pipeline),
    )
