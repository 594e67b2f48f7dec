"""Runs of the programs in examples/, in tests: a model to start from, and their records and weights in any layout."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig

from conformance.case import sizes_of
from picotron.config import Training
from picotron.parallelize import unwrap
from tests.support.oracle import our_model, tiny_llama, torch_adamw, with_exact_norms
from tests.support.program import options
from tests.support.samples import read_jsonl, write_tokenizer
from tests.support.training import CPU, all_stages, set_up_grid
from workbench.own_loops.trainer import Data, Trainer


def save_weights(folder: Path, config: PreTrainedConfig, seed: int = 0) -> None:
    """Save a model in float64 with transformers."""
    model = LlamaForCausalLM(config).double()
    model.load_state_dict(our_model(config, seed=seed).state_dict())
    model.save_pretrained(folder)


def save_model(folder: Path, seed: int = 0, **changes: Any) -> str:
    """Save a model of 300 tokens, and a tokenizer. Returns the name of the folder."""
    save_weights(folder, tiny_llama(**{"vocab_size": 300, **changes}), seed)
    return write_tokenizer(folder)


def words(layout: str, batch: int, **keys: Any) -> list[str]:
    """Return the command line of a run in float64 with two micro-batches and a constant learning rate;
    `training__seed=1` sets training.seed.
    """
    sizes = sizes_of(layout)
    keys = {f"distributed__{axis}_size": size for axis, size in sizes.items()} | keys
    keys |= {"training__micro_batch_size": batch // (2 * sizes["dp"]), "training__gradient_accumulation_steps": 2}
    keys |= {"model__dtype": "float64", "training__warmup_steps": 0, "training__lr_scheduler": "constant"}
    return options(keys)


def load(folder: Path | str) -> Any:
    """Load a model with transformers, in float64."""
    return with_exact_norms(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64))


def log_probs(model: nn.Module, tokenizer: Any, prompt: str, answer: str, has_end: bool = True) -> Tensor:
    """Return the log-probability of each token of an answer, also of its end token: one text, one model, no padding."""
    text = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids = torch.tensor([*text["input_ids"], *[tokenizer.eos_token_id] * has_end])
    first = sum(end <= len(prompt) for _, end in text["offset_mapping"])
    found = model(ids[None, :-1]).logits[0].log_softmax(-1)
    return found[range(first - 1, len(ids) - 1), ids[first:]]


def train_reference(
    model: nn.Module, training: Training, steps: int, statistics: Callable[[], dict[str, Tensor]]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train with torch's AdamW on the mean of the "loss" that `statistics` computes before each step. Returns the means
    of all statistics with the gradient norms, and the weights at the end.
    """
    parameters, records = list(model.parameters()), list[dict[str, float]]()
    optimizer = torch_adamw(parameters, training)
    for _ in range(steps):
        optimizer.zero_grad()
        means = {name: each.double().mean() for name, each in statistics().items()}
        means["loss"].backward()
        means["grad_norm"] = nn.utils.clip_grad_norm_(parameters, training.max_grad_norm or math.inf)
        optimizer.step()
        records.append({name: each.item() for name, each in means.items()})
    return records, {name: parameter.detach() for name, parameter in model.named_parameters()}


def make_trainer(config: Any, data: Data, frozen: Callable[[str], bool] = lambda name: False) -> Trainer:
    """Return a Trainer in the process group of a pool."""
    set_up_grid(config)
    Path(config.checkpoint.save_dir).mkdir(exist_ok=True)
    return Trainer(config, CPU, data, frozen)


def results(trainer: Trainer) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the records of a run, and the full weights at its end."""
    records = read_jsonl(Path(trainer.config.checkpoint.save_dir, "metrics.jsonl"))
    return records, all_stages(unwrap(trainer.model), "data")
