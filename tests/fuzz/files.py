"""Files of a case, drawn from its seeds: the model's config, a tokenizer and a data set; and its own batches."""

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from picotron.config import Config
from picotron.model.cross_entropy import IGNORE_INDEX
from tests.fuzz.cases import STEPS, Case
from tests.fuzz.chat_templates import TEMPLATES
from tests.fuzz.tokenizer_kinds import WORDS, make_tokenizer
from workbench.run.config_reader import override, parse_config

VOCABULARY = 480  # of tokenizers

cached_tokenizer = functools.cache(make_tokenizer)


def model_config(case: Case) -> PreTrainedConfig:
    sizes = {"family": "llama"} | case["model"]
    if case["data"]["kind"] != "own":
        sizes = sizes | {"vocab_size": VOCABULARY + sizes["vocab_size"]}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id"))
    return AutoConfig.for_model(
        sizes.pop("family"), **sizes, **tokens, max_position_embeddings=128, initializer_range=0.2
    )


def config_of(case: Case, folder: Path, part: int = 0) -> Config:
    """Return the config of the first part of a case, up to a checkpoint, or of the second one."""
    keys = {
        "distributed.use_cpu": True,
        "model.name": str(folder / "model"),
        "model.dtype": "float64",
        "training.total_train_steps": STEPS,
        "training.learning_rate": 1e-2,
        "dataset.name": str(folder / "data.jsonl"),
        "checkpoint.save_dir": str(folder / "run"),
    } | case["config"]
    if case["data"].get("evaluated"):
        keys["dataset.eval_name"] = str(folder / "evaluation.jsonl")
    kind, shape = case["data"]["kind"], case["data"].get("shape")
    if kind == "samples" or shape == "pairs":
        keys |= {"dataset.prompt_column": "prompt", "dataset.completion_column": "completion"}
    elif shape:
        keys["dataset.messages_column"] = "messages"
    if shape:
        keys["dataset.assistant_turns"] = case["data"]["turns"]
    if case["resume"]:
        keys["checkpoint.save_frequency"] = 100  # so that only the last step is saved
        if part == 1:
            keys |= case["resume"]["config"] | {"checkpoint.load_path": "latest"}
    data: dict[str, Any] = {}
    for key, value in keys.items():
        override(data, key, value)
    config = parse_config(data)
    if case["resume"] and part == 0:
        step = config.global_batch_size * config.training.seq_length
        tokens = case["resume"]["after"] * step - case["data"]["seed"] % step  # which the last step exceeds
        config = config.model_copy(update={"training": config.training.model_copy(update={"max_tokens": tokens})})
    return config


def tokenizer_of(case: Case) -> PreTrainedTokenizerBase:
    """Return the tokenizer that transformers reads from the model's folder: for qwen2 not the one that was saved."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(case, Path(folder))
        return AutoTokenizer.from_pretrained(folder)


def write_model(case: Case, folder: Path) -> None:
    """Write the model's config and its tokenizer."""
    tokenizer = cached_tokenizer(case["data"].get("tokenizer", "byte-level"), VOCABULARY)
    tokenizer.chat_template = TEMPLATES.get(case["data"].get("template"))
    tokenizer.save_pretrained(folder)
    model_config(case).save_pretrained(folder)


def write_files(case: Case, folder: Path) -> None:
    """Write the model folder and the data set."""
    write_model(case, folder / "model")
    for name, records in (("data", records_of(case)), ("evaluation", evaluated_of(case))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def words(dice: random.Random, most: int) -> str:
    return "".join(
        dice.choice(WORDS.split(" ")) + dice.choice((" ", " ", " ", "\n", "", "  "))
        for _ in range(dice.randint(0, most))
    )


def records_of(case: Case) -> list[dict[str, Any]]:
    """Return the records of the data set: enough for a step and the evaluation, if they are not too short."""
    data, config = case["data"], case["config"]
    if data["kind"] == "own":
        return []
    dice = random.Random(data["seed"])
    rows = (1 + config.get("training.eval_steps", 0)) * config["distributed.dp_size"]
    rows *= config["training.micro_batch_size"] * config["training.gradient_accumulation_steps"]
    # Some texts have the start token already, as a chat template has written it.
    start = cached_tokenizer(data["tokenizer"], VOCABULARY).bos_token or ""
    start = start if random.Random(f"{data['seed']} start").random() < 0.2 else ""
    count = dice.randint(0, 5) + (2 + rows * config["training.seq_length"] // 8 if data["kind"] == "text" else 5 * rows)
    if data["kind"] == "text":
        return [{"text": start + words(dice, 12)} for _ in range(count)]
    if data["kind"] == "samples":
        return [{"prompt": start + words(dice, 4), "completion": words(dice, 5)} for _ in range(count)]
    return [conversation(dice, data["shape"]) for _ in range(count)]


def evaluated_of(case: Case) -> list[dict[str, Any]]:
    """Return the records of the data set for evaluations, or [] if the case has none."""
    data = case["data"]
    return records_of(case | {"data": data | {"seed": data["seed"] + 1}})[: data.get("evaluated") or 0]


def conversation(dice: random.Random, shape: str) -> dict[str, Any]:
    """Return a record with a conversation, some messages of which may not count."""
    turns = [{"role": "system", "content": words(dice, 2)}] if dice.random() < 0.3 else []
    for _ in range(dice.randint(1, 2)):
        answer: dict[str, Any] = {"role": "assistant", "content": words(dice, 3)}
        if dice.random() < 0.2:
            answer |= dice.choice(({"weight": 0}, {"weight": 1}, {"train": False}, {"train": True, "weight": 1.0}))
        turns += [{"role": "user", "content": words(dice, 3)}, answer]
    if shape == "pairs":
        return {"prompt": turns[:-1], "completion": turns[-1:]}
    if shape == "ShareGPT":
        names = {"user": "human", "assistant": "gpt"}
        turns = [
            {"from": names.get(each.pop("role"), "system"), "value": each.pop("content"), **each} for each in turns
        ]
    return {"messages": turns}


def own_batch(case: Case, sequences: int, step: int) -> dict[str, Any]:
    """Return the global batch of a step: random tokens, weights, targets of -100 and documents. If sequences of
    different lengths are packed, targets beyond the `lengths` of the rows are -100.
    """
    data, vocab, length = case["data"], case["model"]["vocab_size"], case["config"]["training.seq_length"]
    generator = torch.Generator().manual_seed(1000 * data["seed"] + step)
    ids = torch.randint(vocab, (sequences, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(sequences, length, generator=generator) < data["ignored"]] = IGNORE_INDEX
    batch = {"input_ids": ids[:, :-1], "target_ids": targets}
    if data["weights"]:
        weights = torch.rand(sequences, length, generator=generator, dtype=torch.float64)
        batch["target_weights"] = weights * (torch.rand(sequences, 1, generator=generator) < 0.7)
        if data["loss"] == "cross_entropy":
            targets[batch["target_weights"] == 0] = vocab  # no id of the model, which is allowed there
    if data["documents"]:
        starts = torch.rand(sequences, length, generator=generator) < 0.3
        starts[:, 0] = True
        first = starts.flatten().nonzero()[:, 0]
        batch["cu_seqlens"] = torch.cat((first, torch.tensor([sequences * length]))).int()
        lengths = batch["cu_seqlens"].diff()
        batch["position_ids"] = torch.cat([torch.arange(int(n)) for n in lengths]).view(sequences, length)
    if data.get("packed"):
        batch["lengths"] = torch.randint(1, length + 1, (sequences,), generator=generator)
        targets[torch.arange(length) >= batch["lengths"][:, None]] = IGNORE_INDEX
    return batch


def sequences_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sequences of a global batch, cut to their lengths."""
    names = [name for name in batch if name != "lengths"]
    return [{name: batch[name][i, :n] for name in names} for i, n in enumerate(batch["lengths"].tolist())]
