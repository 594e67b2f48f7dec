"""Train a Llama-like model:  python train.py --config template/base_config.json

This file is the table of contents of a run: config, process groups, data, model, optimizer, outputs and training loop.
Each rank of the layout is a new process, which this one starts. On several machines, torchrun starts them.
"""

import workbench.run.begin  # noqa: F401 -- before the imports that take long

# isort: split
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.model.families import differences
from picotron.model.llama import Llama
from picotron.model.weights import initial_weights
from picotron.optimizer import make_scheduler
from picotron.parallelize import unwrap
from picotron.pipeline_parallel.pipeline_parallel import (
    PipelineParallel,
    Step,
    evaluate_pipeline,
    train_step,
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.pipeline_parallel.stages import plan_stages
from picotron.process_group_manager import setup_process_group_manager
from workbench.run.checkpoint.checkpoint import find_checkpoint
from workbench.run.checkpoint.writer import CheckpointWriter
from workbench.run.config_reader import parse_command_line, parse_config
from workbench.run.launch import (
    StopSignals,
    exit_after_signal,
    exit_on_error,
    init_process_group,
    set_up_device,
    set_up_logging,
)
from workbench.run.layout_checks import check_run
from workbench.run.metrics import Metrics, Progress, evaluation_record
from workbench.run.ranks import run_ranks
from workbench.run.rows import data_fingerprint, targets_and_bytes
from workbench.run.run_folder import begin_run, claim_save_dir
from workbench.run.stage_table import format_stages
from workbench.run.token_files import Prepare, has_token_files, load_data


def check(config: Config) -> tuple[PreTrainedConfig, Any]:
    """Check that the model, the layout and the processes fit together. Returns the model's config, and the workbench's
    plan of the pipeline, if the config needs one, see `Config.needs_workbench`, else None.
    """
    if config.needs_workbench:
        from workbench.pipelines.engine import plan_pipeline

        return check_run(config, plan_pipeline)
    return check_run(config)[0], None


def make_pipeline(
    config: Config, model_config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[Llama], PipelineParallel], Step, Step]:
    """Make a pipeline with one stage on each pp rank, which may be the only one.

    Returns:
        The function that keeps this rank's layers of a Llama, the training step, and the evaluation.
    """
    layout, training, stages = config.distributed, config.training, plan_stages(config, model_config)
    shards = layout.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
    shape = training.micro_batch_size, training.seq_length // shards, model_config.hidden_size
    hidden_states: dict[str, Any] = {"tensor_shapes": shape, "device": device, "dtype": dtype}
    if layout.pp_size == 1:
        step = partial(train_step, device=device)
    else:
        loops = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}
        step = partial(loops[layout.pp_engine], **hidden_states)
    pipeline = partial(PipelineParallel, stage=stages[pgm.process_group_manager.pp_rank])
    return pipeline, step, partial(evaluate_pipeline, **hidden_states)


def main() -> None:
    set_up_logging()
    options = parse_command_line(sys.argv[1:])
    if options.explain:
        from workbench.explain.explain import explain

        return explain(parse_config(options.data), options.hardware, options.gib)
    config = parse_config(options.data)
    if options.evaluate:
        from workbench.own_loops.evaluation import evaluate

        return run_ranks(config.distributed.world_size, partial(evaluate, config, options.evaluate))
    model_config, plan = check(config)  # most mistakes of users are found here, before there are ranks
    run_ranks(config.distributed.world_size, partial(train, config, model_config, plan))


def train(config: Config, model_config: PreTrainedConfig, plan: Any) -> None:
    """Train on this rank. Arguments: see `check`."""
    layout, training, dtype = config.distributed, config.training, getattr(torch, config.model.dtype)
    claim_save_dir(config)
    device = set_up_device(config)

    # Process groups of the layout.
    init_process_group(config, device, model_config, plan and plan.identity)
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)

    # The algorithms: those of picotron/. The table of variants has those for other keys of the config, and for experts.
    if config.needs_variants or differences(model_config).experts:
        from workbench.variants.choose import build_model, make_optimizer, split_train_eval, update_weights
    else:
        from picotron.optimizer import make_optimizer, update_weights
        from picotron.parallelize import build_model  # type: ignore[assignment]  # has no `frozen`
        from workbench.run.rows import split_train_eval

    # Data: token files, which all ranks map into memory. A checkpoint stores the position to resume from.
    checkpoint = find_checkpoint(config, model_config)
    prepare: Prepare | None = None
    if not all(has_token_files(Path(name)) for name in (config.dataset.name, config.dataset.eval_name) if name):
        from workbench.prepare.tokens import prepare  # for text, which one process per machine tokenises
    trained = checkpoint.tokenizer if checkpoint else None
    data, evaluation, tokenizer = load_data(config, model_config, trained, prepare)
    train_rows, eval_rows = split_train_eval(data, config, evaluation)
    fingerprint = data_fingerprint(train_rows, config)
    progress = checkpoint.progress(fingerprint, training) if checkpoint else Progress()
    data_loader = MicroBatchDataLoader(train_rows, config, device, progress.samples)
    eval_loader = None
    if eval_rows:
        batches = len(eval_rows) // config.global_batch_size
        eval_loader = MicroBatchDataLoader(eval_rows, config, device, shuffle=False, batches=batches)
        evaluated = targets_and_bytes(eval_rows, tokenizer)

    # The pipeline: the function that keeps this rank's layers of the model, the training step and the evaluation.
    if plan:
        pipeline, (step, evaluate) = plan.wrap, plan.make_steps(config, model_config, device, dtype, progress.step)
        if config.logging.sample_prompt:
            from workbench.generation.samples import with_samples

            evaluate = with_samples(evaluate, config, model_config, tokenizer)
    else:
        pipeline, step, evaluate = make_pipeline(config, model_config, device, dtype)
    if layout.pp_size > 1:
        table = plan or format_stages(plan_stages(config, model_config), range(layout.pp_size))
        logging.getLogger("picotron").info("the pp ranks of the pipeline:\n%s", table)

    # This rank's part of the model, with the four parallelisms applied, and its optimizer.
    weights = checkpoint.weights() if checkpoint else initial_weights(model_config, training.seed)
    model = build_model(config, model_config, pipeline, device, dtype, weights)
    optimizer = make_optimizer(model, config)
    if checkpoint:
        checkpoint.restore(optimizer, unwrap(model))
    scheduler = make_scheduler(optimizer, training, progress.step)

    # Outputs. Files of an earlier run are archived, except those up to the step from which this run resumes.
    resumed = checkpoint.state_in(config.checkpoint.save_dir) if checkpoint else None
    dist.barrier()  # no rank still reads the files of an earlier run
    records = (
        begin_run(config, resumed.step if resumed else None, plan and plan.searched) if dist.get_rank() == 0 else []
    )
    metrics = Metrics(config, model_config, device, dtype, records, resumed)
    writer = CheckpointWriter(
        config, model_config, unwrap(model), optimizer, tokenizer, fingerprint, metrics.wandb_run_id
    )

    # Training loop. A stop signal ends it after the current step, with a checkpoint.
    signals, stop = StopSignals(), 0
    with writer:
        if eval_loader and progress.step == 0:
            metrics.log({"step": 0, "tokens": 0} | evaluation_record(evaluate(model, eval_loader), *evaluated))
        while not stop and not progress.is_end(config):
            metrics.start_step()
            loss = step(model, data_loader)
            learning_rate = float(scheduler.get_last_lr()[0])
            grad_norm = update_weights(model, optimizer, training.max_grad_norm)
            scheduler.step()
            progress = progress.after_step(config)
            record, stop = metrics.end_step(progress, loss, grad_norm, learning_rate, signals.received)
            record |= getattr(unwrap(model), "after_step", dict)()  # balances experts
            if eval_loader and progress.step % training.eval_frequency == 0:
                record |= evaluation_record(evaluate(model, eval_loader), *evaluated)
            metrics.log(record)
            writer.check()
            if writer.is_due(progress) or stop:
                writer.save(progress)

    metrics.close()
    dist.barrier()  # the other ranks are stopped when one of them exits with an error code
    dist.destroy_process_group()
    if stop:
        exit_after_signal(stop)


if __name__ == "__main__":
    exit_on_error(main)
