"""Training in tests: a rank's shard of a model, steps on random tokens, and full tensors gathered from all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.llama import Llama
from picotron.model.placement import main_grad, placement, replicas
from picotron.optimizer import make_scheduler
from picotron.parallelize import unwrap
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, Step
from picotron.process_group_manager import ProcessGroupManager, setup_process_group_manager
from tests.support.oracle import CPU, drawn_weights, random_rows
from train import make_pipeline
from workbench.pipelines.engine import make_train_step, plan_pipeline
from workbench.pipelines.modules import LlamaStages
from workbench.run.checkpoint.checkpoint import find_checkpoint
from workbench.run.checkpoint.writer import CheckpointWriter
from workbench.run.metrics import Progress, global_mean
from workbench.run.rows import data_fingerprint
from workbench.variants.choose import build_model, make_optimizer, update_weights


def set_up_grid(config: Config) -> ProcessGroupManager:
    layout = config.distributed
    return setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)


def dtype_of(config: Config) -> torch.dtype:
    return getattr(torch, config.model.dtype)


# --------------------------------------------------------------------------------------------------- a rank's shard


def pipeline_of(
    config: Config, model_config: PreTrainedConfig
) -> tuple[Callable[[Llama], PipelineParallel], Step, Step]:
    """Make the pipeline as train.py does, see `make_pipeline`. The process groups must exist."""
    if not config.needs_workbench:
        return make_pipeline(config, model_config, CPU, dtype_of(config))
    plan = plan_pipeline(config, model_config)
    return plan.wrap, *plan.make_steps(config, model_config, CPU, dtype_of(config))


def wrapped(config: Config, model_config: PreTrainedConfig) -> DataParallel:
    """Build this rank's shard of the model as programs with their own loops do."""
    set_up_grid(config)
    weights = drawn_weights(model_config, config.training.seed)
    pipeline = plan_pipeline(config, model_config).wrap
    return build_model(config, model_config, pipeline, CPU, dtype_of(config), weights)


def stage_of(config: Config, model_config: PreTrainedConfig) -> LlamaStages:
    """Build the same model as `wrapped`, without the data-parallel wrapper."""
    model = wrapped(config, model_config)
    model.close()
    return model.module


def step_of(config: Config, model_config: PreTrainedConfig) -> Any:
    """Return the training step of programs with their own loops."""
    return make_train_step(config, plan_pipeline(config, model_config), CPU, dtype_of(config))


def loader_of(config: Config, **arguments: int) -> MicroBatchDataLoader:
    """Return a loader of `random_rows`."""
    return MicroBatchDataLoader(random_rows(config, **arguments), config, CPU)


def batches(count: int) -> list[dict[str, Any]]:
    """Return `count` micro-batches of two sequences of 16 tokens, identical in every call."""
    ids = torch.randint(61, (count, 2, 17), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, -1)
    return [
        {"input_ids": x[:, :-1], "target_ids": x[:, 1:], "position_ids": positions, "hidden_states": None} for x in ids
    ]


def train_steps(config: Config, model_config: PreTrainedConfig, tokenizer: Path | None = None) -> dict[str, Any]:
    """Train on random tokens as train.py does. Returns the losses and gradient norms of all steps, and the full weights
    at the end.

    Training resumes from the config's checkpoint, if there is one, and writes checkpoints if `tokenizer` is given.
    """
    set_up_grid(config)
    checkpoint, rows = find_checkpoint(config, model_config), random_rows(config)
    fingerprint, seed = data_fingerprint(rows, config), config.training.seed
    progress = checkpoint.progress(fingerprint, config.training) if checkpoint else Progress()
    loader = MicroBatchDataLoader(rows, config, CPU, progress.samples)
    weights = checkpoint.weights() if checkpoint else drawn_weights(model_config, seed)
    pipeline, take_step, _ = pipeline_of(config, model_config)
    model = build_model(config, model_config, pipeline, CPU, dtype_of(config), weights)
    llama, optimizer = unwrap(model), make_optimizer(model, config)
    if checkpoint:
        checkpoint.restore(optimizer, llama)
    scheduler = make_scheduler(optimizer, config.training, progress.step)
    writer = CheckpointWriter(config, model_config, llama, optimizer, tokenizer, fingerprint) if tokenizer else None
    losses, norms = [], []
    while not progress.is_end(config):
        losses.append(global_mean(take_step(model, loader)).item())
        norms.append(update_weights(model, optimizer, config.training.max_grad_norm).item())
        scheduler.step()
        vars(llama).get("after_step", dict)()
        progress = progress.after_step(config)
        if writer:
            writer.check()
        if writer and writer.is_due(progress):
            writer.save(progress)
    if writer:
        writer.wait()
    return {"losses": losses, "grad_norms": norms, "weights": all_stages(llama, "data")}


# ---------------------------------------------------------------------------------------------------- the full model


def full_tensor(parameter: nn.Parameter, attribute: str) -> Tensor:
    """Return a copy of a parameter (`data`) or its gradient (`main_grad`), gathered from the ranks that own slices."""
    owned, group = placement(parameter).owned, replicas(parameter)
    if attribute == "main_grad" and not parameter.requires_grad:
        return torch.zeros_like(parameter)  # frozen
    if owned is None:
        return getattr(parameter, attribute).clone()
    own = owned.weight if attribute == "data" else main_grad(parameter)
    assert own.numel() == len(range(*owned.bounds(dist.get_rank(group))))
    slices: list[Tensor] = [own] * dist.get_world_size(group)
    dist.all_gather_object(slices, own.clone(), group=group)
    return torch.cat(slices).view(parameter.shape)


def gathered(model: nn.Module, attribute: str) -> dict[str, Tensor]:
    """Gather the unsharded parameters (`data`) or gradients (`main_grad`) by name from all tp ranks, to the CPU."""
    grid, whole = pgm.process_group_manager, {}
    for name, parameter in model.named_parameters():
        shard = placement(parameter).shard
        local = full_tensor(parameter, attribute)
        parts = [torch.empty_like(local) for _ in range(grid.tp_world_size)]
        dist.all_gather(parts, local, group=grid.tp_group)
        local, parts = local.cpu(), [part.cpu() for part in parts]
        if shard is None:
            for part in parts:
                assert torch.equal(part, parts[0]), f"{name} differs between ranks"
            whole[name] = local
        else:
            for i in range(0, len(parts), shard.replicas):
                for copy in parts[i : i + shard.replicas]:
                    assert torch.equal(copy, parts[i]), f"{name} differs between copies"
            joined = torch.cat(parts[:: shard.replicas], shard.dim)
            beyond = joined.narrow(shard.dim, shard.full_size, joined.size(shard.dim) - shard.full_size)
            assert beyond.count_nonzero() == 0, f"{name}: the padding is not zero"
            whole[name] = joined.narrow(shard.dim, 0, shard.full_size).clone()
    return whole


def all_stages(model: nn.Module, attribute: str) -> dict[str, Tensor]:
    """Gather the parameters (`data`) or gradients (`main_grad`) of the full model by name from all ranks: other stages,
    and other experts.
    """
    grid = pgm.process_group_manager
    parts: list[dict[str, Tensor]] = [{} for _ in range(grid.world_size)]
    mine = gathered(model, attribute)
    has_others = grid.cp_dp_rank == 0 or any(placement(p).average_over for p in model.parameters())
    dist.all_gather_object(parts, mine if has_others else {})
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(tensor, whole.setdefault(name, tensor)), f"the copies of {name} differ"
    return whole
