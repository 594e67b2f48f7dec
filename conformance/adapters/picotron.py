"""Adapter of picotron: its parts of train.py on the case's batches, in any layout and schedule.

Words of a layout besides the sizes: a schedule, `chunks2`, `ep2` (expert parallel), `sp` (sequence parallel), `zigzag`
or `contiguous`, `ring`, `all_gather` or `ulysses`, `zero1` or `zero3`.
"""

import logging
import shutil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import Case, NotOffered, Part, Result
from conformance.case import AXES, Batch, is_of_case, weights_of
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.model.placement import main_grad, owned_weight, placement, replicas
from picotron.parallelize import unwrap
from workbench.generation.rotation import generate
from workbench.generation.sampling import Sampling
from workbench.own_loops.batches import Loss, cross_entropy, forward_batch
from workbench.own_loops.log_probs import log_probs
from workbench.own_loops.trainer import Data, Trainer, set_up
from workbench.pipelines.engine import check_run
from workbench.run.config_reader import parse_config
from workbench.run.launch import has_gpu_per_rank
from workbench.run.run_folder import checkpoint_folders
from workbench.schedules.schedules import SCHEDULES

LAYOUTS = (
    *("pp2 afab", "pp2 looped_bfs", "dp2 x pp2 interleaved_1f1b zero1", "pp2 x tp2 zb_h1 sp", "dp2 x pp2 zbv zero3"),
    *("pp2 x cp2 dualpipev contiguous all_gather", "pp2 x cp2 v_min ulysses zero3"),
)


KEYS = {  # of the config's section `distributed`, by the words that are their values
    **dict.fromkeys((*SCHEDULES, "auto"), "pp_engine"),
    **dict.fromkeys(("zigzag", "contiguous"), "cp_sharding"),
    **dict.fromkeys(("ring", "all_gather", "ulysses"), "cp_engine"),
    **dict.fromkeys(("zero1", "zero3"), "dp_engine"),
}
NUMBERS = {"chunks": "pp_chunks"} | {axis: f"{axis}_size" for axis in (*AXES, "ep")}


def keys_of(layout: str) -> dict[str, Any]:
    """Return the keys of the config's section `distributed` that the words of a layout name."""
    found: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
    for word in layout.split():
        name = word.rstrip("0123456789")
        if word == "sp":
            found["sequence_parallel"] = True
        elif word in KEYS:
            found[KEYS[word]] = word
        elif name in NUMBERS and name != word:
            found[NUMBERS[name]] = int(word.removeprefix(name))
        elif word != "x":
            raise NotOffered(f"the word {word!r} means nothing to picotron")
    return found


def config_of(case: Case) -> Config:
    layout = " ".join(word for word in case.layout.split() if not is_of_case(word))
    sequences, length = case.batch(-1)["input_ids"].shape
    rows, left = divmod(sequences, case.micro_batches * case.sizes["dp"])
    case.require(not left, f"{sequences} sequences do not divide into the micro-batches")
    checkpoints = [] if case.load is None else list(checkpoint_folders(case.load).values())
    return parse_config({
        "distributed": keys_of(layout) | {"use_cpu": not has_gpu_per_rank()},
        "model": {"name": str(case.model_folder), "dtype": case.dtype, "pretrained": True},
        "training": {
            "seq_length": length, "micro_batch_size": rows, "gradient_accumulation_steps": case.micro_batches,
            "total_train_steps": case.total_steps, "learning_rate": case.learning_rate,
            "warmup_steps": case.warmup_steps, "min_lr_ratio": case.min_lr_ratio, "weight_decay": case.weight_decay,
            "adam_beta1": case.beta1, "adam_beta2": case.beta2, "adam_eps": case.eps,
            "max_grad_norm": case.max_grad_norm,
        },
        "dataset": {"name": "none"},
        "checkpoint": {
            "save_dir": str(case.output),
            "load_path": str(checkpoints[-1]) if checkpoints else "",
            "save_frequency": 1 if case.saves or case.exports else None,
        },
    })  # fmt: skip


def run(case: Case) -> Result:
    logging.getLogger("picotron").setLevel(logging.ERROR)
    config = config_of(case)
    try:
        check_run(config)
    except UserError as error:
        raise NotOffered(str(error)) from None
    with set_up(config, Data()) as trainer:
        return train(case, trainer)


def train(case: Case, trainer: Trainer) -> Result:
    llama, gradients = unwrap(trainer.model), list[Any]()
    result = Result(gradients=gradients)

    def keep_gradients(_: object) -> dict[str, float]:
        gradients.append({name: whole_part(p, main_grad(p)) for name, p in llama.named_parameters() if p.requires_grad})
        return {}

    for step in case.steps:
        record = trainer.train(trainer.split(as_packed(case.batch(step))), own_loss(case), keep_gradients)
        result.losses.append(record["loss"])
        result.grad_norms.append(record["grad_norm"])
        if case.evaluates:
            result.evaluations += evaluated(case, trainer)
    if case.saves or case.exports:
        trainer.writer.save(trainer.progress)
    if case.exports and dist.get_rank() == 0:
        shutil.copytree(max(checkpoint_folders(case.output).values()), case.output, dirs_exist_ok=True)
    if case.new_tokens:
        layout = trainer.config.distributed
        case.require(layout.dp_engine != "zero3" and layout.ep_size == 1, "generation needs all weights on a rank")
        found = generate(trainer.stage, case.prompts(), Sampling(case.new_tokens))
        result.tokens = [completion.tokens for completion in found]
    masters = trainer.optimizer.masters
    result.weights = {name: whole_part(p, masters.get(p, owned_weight(p))) for name, p in llama.named_parameters()}
    return result


def as_packed(batch: Batch) -> Batch:
    """Describe documents as picotron does, by their boundaries among all tokens of the batch."""
    if "document_ids" not in batch:
        return batch
    starts = (batch["position_ids"].flatten() == 0).nonzero()[:, 0]
    packed = {name: tensor for name, tensor in batch.items() if name != "document_ids"}
    return packed | {"cu_seqlens": torch.cat([starts, torch.tensor([batch["position_ids"].numel()])]).int()}


def own_loss(case: Case) -> Any:
    def loss(head: Any, x: Tensor, batch: Batch) -> Loss:
        losses = case.token_losses(head(x), batch["target_ids"])
        return losses.sum(), weights_of(batch).sum(), {}

    return cross_entropy if case.loss == "cross_entropy" else loss


def evaluated(case: Case, trainer: Trainer) -> list[float]:
    """Return the loss of the evaluation batch, on the ranks that compute it."""

    def sums(head: Any, x: Tensor, batch: Batch) -> Tensor:
        weights = weights_of(batch)
        return torch.stack([-(log_probs(head, x, batch["target_ids"]) * weights).sum(), weights.sum()])

    found = forward_batch(
        trainer.evaluate, trainer.model, trainer.split(as_packed(case.evaluation())), sums, merge=list
    )
    if found is None:
        return []
    total = torch.stack(found).sum(0)
    all_reduce(total, pgm.process_group_manager.cp_dp_group)
    return [(total[0] / total[1]).item()]


def whole_part(parameter: nn.Parameter, tensor: Tensor) -> Part:
    """Return a copy of this rank's shard of a weight or a gradient, gathered from the ranks that own slices of it."""
    tensor = tensor.detach().clone()
    if owned := placement(parameter).owned:
        group = replicas(parameter)
        slices: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(slices, tensor, group=group)
        tensor = torch.cat(slices).view(parameter.shape)
        assert owned.numel == tensor.numel()
    shard = placement(parameter).shard
    if shard is None:
        return Part(tensor, (0,) * tensor.ndim)
    start = tuple(shard.start if dim == shard.dim else 0 for dim in range(tensor.ndim))
    return Part(tensor.narrow(shard.dim, 0, shard.stop - shard.start), start)
