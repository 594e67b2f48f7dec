"""A rank's side of a case: the training of train.py, or `train_batch` on own batches, in a process of the pool."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import MicroBatchDataLoader
from picotron.model import cross_entropy
from picotron.optimizer import clip_grad_norm, make_scheduler
from picotron.parallelize import unwrap
from tests.fuzz.cases import Case
from tests.fuzz.files import config_of, own_batch, sequences_of
from tests.fuzz.habits import Interrupted
from tests.fuzz.losses import LOSSES, failing
from tests.fuzz.pipelines import train_stages
from tests.fuzz.programs import run_program
from tests.support.oracle import drawn_weights
from tests.support.training import CPU, all_stages, pipeline_of, set_up_grid
from workbench.own_loops.batches import forward_batch, split_batch, train_batch
from workbench.own_loops.sequences import pack_sequences
from workbench.pipelines.engine import check_layout
from workbench.prepare.tokens import prepare
from workbench.run import layout_checks
from workbench.run.checkpoint.checkpoint import find_checkpoint
from workbench.run.checkpoint.writer import CheckpointWriter
from workbench.run.launch import check_world_size
from workbench.run.metrics import Progress, global_mean
from workbench.run.model_config import load_model_config
from workbench.run.rows import data_fingerprint
from workbench.run.token_files import load_data
from workbench.variants import choose, zero1
from workbench.variants.choose import make_optimizer, split_train_eval
from workbench.variants.float8 import CalledProjections


def run_part(case: Case, folder: Path, part: int) -> dict[str, Any]:
    """Run a part of a case on this rank. Returns its results, or {"refused": the sentence}."""
    logging.getLogger("picotron").setLevel(logging.ERROR)
    few = mock.patch.object(cross_entropy, "CHUNK_TOKENS", 5)  # so that the head needs several chunks
    with few, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        try:
            if "program" in case:
                return run_program(case)
            if "modules" in case:
                return train_stages(case)
            return train(case, config_of(case, folder, part))
        except UserError as error:
            return {"refused": str(error)}


@contextlib.contextmanager
def no_refusals() -> Iterator[None]:
    """Let a refusal be a failure: once training has begun, only weights that cancel may be refused."""
    try:
        yield
    except UserError as error:
        if "positive, finite sum" not in str(error):
            raise AssertionError(f"a step is refused: {error}") from error
        raise


def look(module: nn.Module, inputs: Any, output: Any) -> None:
    """Read the inputs of a module, as hooks for statistics do."""
    assert inputs[0].isfinite().all(), "a hook reads numbers that are not finite"


def train(case: Case, config: Config) -> dict[str, Any]:
    layout, training = config.distributed, config.training
    check_world_size(layout, dist.get_world_size())
    model_config = load_model_config(config.model)
    is_own = case["data"]["kind"] == "own"
    # A program with its own batches has a plan of the workbench in any case; train.py, only if it needs one.
    plan: Any = (check_layout if is_own or config.needs_workbench else layout_checks.check_layout)(config, model_config)
    grid = set_up_grid(config)
    checkpoint = find_checkpoint(config, model_config)
    fingerprint, tokenizer, eval_loader = "", Path(config.model.name), None
    if not is_own:
        data, evaluation, tokenizer = load_data(config, model_config, None, prepare)
        train_rows, eval_rows = split_train_eval(data, config, evaluation)
        fingerprint = data_fingerprint(train_rows, config)
        if eval_rows:
            count = len(eval_rows) // config.global_batch_size
            eval_loader = MicroBatchDataLoader(eval_rows, config, CPU, shuffle=False, batches=count)
    progress = checkpoint.progress(fingerprint, training) if checkpoint else Progress()
    if not is_own:
        loader = MicroBatchDataLoader(train_rows, config, CPU, progress.samples)

    weights = checkpoint.weights() if checkpoint else drawn_weights(model_config, training.seed)

    def frozen(name: str) -> bool:
        return any(part in name.replace(".block_sparse_moe.", ".mlp.") for part in case["frozen"])

    if is_own:
        pipeline, (step, evaluate) = plan.wrap, plan.make_steps(config, model_config, CPU, torch.float64)
    else:
        pipeline, step, evaluate = pipeline_of(config, model_config)
    with contextlib.ExitStack() as stack:
        for module, name in ((choose, "DataParallelBucket"), (zero1, "DataParallelZero1")):
            wrapper = functools.partial(getattr(module, name), bucket_mb=case.get("bucket_mb"))
            stack.enter_context(mock.patch.object(module, name, wrapper))
        model = choose.build_model(config, model_config, pipeline, CPU, torch.float64, weights, frozen)
    llama = unwrap(model)
    for name, module in llama.named_modules():
        if case.get("looks") and name.endswith("proj"):
            module.register_forward_hook(look)
        if case.get("calls") and hasattr(module, "project"):
            module.project = CalledProjections(layout.sequence_parallel)
    optimizer = make_optimizer(model, config)
    if checkpoint:
        checkpoint.restore(optimizer, llama)
    scheduler = make_scheduler(optimizer, training, progress.step)
    writer = CheckpointWriter(config, model_config, llama, optimizer, tokenizer, fingerprint)

    def own_step(number: int) -> float:
        batch = own_batch(case, config.global_batch_size, number)
        if case["data"].get("packed"):
            count, sharding = training.gradient_accumulation_steps, layout.cp_sharding
            batches = pack_sequences(sequences_of(batch), count, cp_sharding=sharding).batches
        else:
            batches = split_batch(batch, training.gradient_accumulation_steps, layout.cp_sharding)
        loss_fn = LOSSES[case["data"]["loss"]][0]
        if number == 1 and case["fails"]:
            with contextlib.suppress(Interrupted):
                train_batch(step, model, batches, failing(loss_fn, len(batches)))
        found = train_batch(step, model, batches, loss_fn, scope=case["data"]["scope"])
        result["statistics"].extend(found.statistics.values())
        if case["between"]:
            forward_batch(evaluate, model, batches, merge=list)
        return found.loss

    def loaded_step(_: int) -> float:
        found = global_mean(step(model, loader)).item()
        if case["between"] and eval_loader:
            evaluate(model, eval_loader)
        return found

    take_step = own_step if is_own else loaded_step
    result: dict[str, Any] = {"losses": [], "norms": [], "evaluations": [], "statistics": []}
    with writer, no_refusals():
        if case["resume"]:
            writer.save(progress)
        while not progress.is_end(config):
            result["losses"].append(take_step(progress.step))
            if "gradients" not in result:
                model.finish_grad_sync()
                result["gradients"] = all_stages(llama, "main_grad")
            result["norms"].append(clip_grad_norm(model, training.max_grad_norm).item())
            optimizer.step()
            vars(llama).get("after_step", dict)()
            scheduler.step()
            optimizer.zero_grad()
            progress = progress.after_step(config)
            if eval_loader:
                result["evaluations"].append(global_mean(evaluate(model, eval_loader)).item())
            writer.check()
            if writer.is_due(progress):
                writer.save(progress)
    result["weights"] = all_stages(llama, "data")
    full = ("gradients", "weights")
    return result if grid.global_rank == 0 else {key: result[key] for key in result if key not in full}
