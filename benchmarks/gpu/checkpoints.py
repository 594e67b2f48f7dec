"""Checkpoints from a GPU: runs resume from them, saving them again changes nothing, transformers reads them."""

import functools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.report import Check, Content, Options, checked, header
from conformance.oracle import make_config, random_rows, random_tokens, relative_error, tiny_llama
from conformance.training import device_of, train_steps, wrapped
from picotron.config import Config
from picotron.data.loader import data_fingerprint
from picotron.data_parallel.data_parallel import DataParallel
from picotron.optimizer.optimizer import make_optimizer
from picotron.parallelize import build_model, unwrap
from picotron.process_group_manager import setup_process_group_manager
from picotron.run.checkpoint.checkpoint import Checkpoint, find_checkpoint
from picotron.run.checkpoint.writer import CheckpointWriter
from workbench.pipelines.engine import plan_pipeline
from workbench.prepare.tokens import train_bpe

STEPS, SAVED = 8, 4  # steps of a run, and the step after which a second run resumes
RUNS: dict[str, dict[str, Any]] = {
    "float32": {"model__dtype": "float32"},
    "float32, plain attention": {"model__dtype": "float32", "model__use_flash_attention": False},
    "bfloat16": {"model__dtype": "bfloat16"},
    "bfloat16, plain attention": {"model__dtype": "bfloat16", "model__use_flash_attention": False},
    "bfloat16, async_save": {"model__dtype": "bfloat16", "checkpoint__async_save": True},
}
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}  # of the error of transformers' logits, see kernels.LIMITS
MODEL = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}


def load(config: Config, model_config: LlamaConfig) -> tuple[Checkpoint, DataParallel]:
    """Open the checkpoint of `load_path`, and return it and its model."""
    setup_process_group_manager(1, 1, 1, 1)
    checkpoint = find_checkpoint(config, model_config)
    assert checkpoint is not None
    dtype, plan = getattr(torch, config.model.dtype), plan_pipeline(config, model_config)
    return checkpoint, build_model(config, model_config, plan.wrap, device_of(config), dtype, checkpoint.weights())


def files_changed_by_saving_again(config: Config, model_config: LlamaConfig, tokenizer: Path) -> int:
    """Load a checkpoint, save it without any training, and count the files of tensors that differ."""
    checkpoint, model = load(config, model_config)
    optimizer = make_optimizer(model, config)
    checkpoint.restore(optimizer, unwrap(model))
    fingerprint = data_fingerprint(random_rows(config), config)
    writer = CheckpointWriter(config, model_config, unwrap(model), optimizer, tokenizer, fingerprint)
    with writer:
        writer.save(checkpoint.progress(fingerprint, config.training))
    files, copies = (
        sorted(checkpoint.folder.glob("*.safetensors")),
        Path(config.checkpoint.save_dir, checkpoint.folder.name),
    )
    assert len(files) == (4 if config.model.dtype == "bfloat16" else 3)  # the model and the optimizer's state
    return sum(path.read_bytes() != (copies / path.name).read_bytes() for path in files)


def error_of_transformers(config: Config, model_config: LlamaConfig) -> float:
    """Return the relative error of the logits that transformers computes from a checkpoint."""
    checkpoint, model = load(config, model_config)
    device, dtype = device_of(config), getattr(torch, config.model.dtype)
    ids = torch.from_numpy(random_tokens(64).astype("int64"))[None].to(device)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype).to(device)
    with torch.no_grad():
        return relative_error(theirs(input_ids=ids, use_cache=False).logits, unwrap(model)(ids))


def round_trip(options: Options, changes: dict[str, Any]) -> dict[str, float]:
    """Train, save a checkpoint in the middle, resume from it, and return all differences."""
    model_config = tiny_llama(**MODEL)
    with tempfile.TemporaryDirectory() as home:

        def run(name: str, **more: Any) -> Config:
            return make_config(
                distributed__use_cpu=not options.on_gpu,
                training__total_train_steps=STEPS,
                training__gradient_accumulation_steps=2,
                training__learning_rate=1e-3,
                training__compile=False,
                dataset__shuffle=False,
                checkpoint__save_dir=f"{home}/{name}",
                checkpoint__save_frequency=SAVED,
                **changes | more,
            )

        tokenizer, load_path = Path(home, "tokenizer"), f"{home}/first/step_{SAVED:08d}"
        train_bpe(iter(["def f(x): return x"]), 260).save_pretrained(tokenizer)
        config = run("first")
        model = wrapped(config, model_config, getattr(torch, config.model.dtype))
        losses, _, _ = train_steps(model, config, model_config, tokenizer=tokenizer)

        config = run("second", checkpoint__load_path=load_path)
        checkpoint, model = load(config, model_config)
        resumed, _, _ = train_steps(model, config, model_config, checkpoint=checkpoint)
        differences = [abs(a - b) for a, b in zip(losses[SAVED:], resumed, strict=True)]
        return {
            "files changed by saving again": files_changed_by_saving_again(
                run("third", checkpoint__load_path=load_path), model_config, tokenizer
            ),
            "first loss after resuming": differences[0],
            "last losses after resuming": max(differences),
            "logits of transformers": error_of_transformers(config, model_config),
        }


def checks(options: Options) -> Iterator[Check]:
    for name, changes in RUNS.items():
        measured = functools.cache(functools.partial(round_trip, options, changes))
        # The backwards of fused kernels on GPUs add in any order.
        repeatable = not options.on_gpu or "plain attention" in name
        limits = {
            "files changed by saving again": 0.0,
            "first loss after resuming": 0.0,
            "last losses after resuming": 0.0 if repeatable else math.inf,
            "logits of transformers": LIMITS[changes["model__dtype"]],
        }
        for what, limit in limits.items():
            yield Check([name, what], lambda measured=measured, what=what: [measured()[what]], limit)


def checkpoint_section(options: Options) -> Content:
    """Return the section of the report."""
    return [
        f"A run of {STEPS} steps saves a checkpoint after step {SAVED}, from which a second run resumes. The table has the number of",
        "files of tensors that differ if the checkpoint is loaded and saved again, the difference between the losses of both",
        "runs, and the error of the logits that transformers computes from the checkpoint. With fused attention, a GPU adds up",
        "gradients in a different order in each run, so only the first loss has to be the same bit for bit.",
        *header("run", "difference", "value", "limit", "result"),
        *checked(checks(options), limit=40),
    ]
