"""Model card: the README.md of a checkpoint, with which the model can be handed on.

It names neither folders of this machine nor people, and contains only keys of the config, which has no secrets.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from picotron.config import Config
from picotron.model.families import model_cost
from workbench.run.metrics import Progress
from workbench.run.run_folder import parse_load_path

LEFT_OUT = {"checkpoint", "logging", "environment"}  # sections that say nothing about the model


def model_card(
    config: Config,
    model_config: PreTrainedConfig,
    progress: Progress,
    layout: str,
    versions: dict[str, str],
    records: list[dict[str, Any]],
) -> str:
    """Return the text of a card, with the data for the Hugging Face Hub at its beginning.

    Args:
        layout: layout of the run.
        versions: versions of Python and of libraries.
        records: records of metrics.jsonl.
    """
    training, ranks = config.training, config.distributed.world_size
    start = parse_load_path(config.checkpoint.load_path)[1] or (config.model.name if config.model.pretrained else "")
    data = config.dataset.weights
    hub = {"library_name: transformers": True, "pipeline_tag: text-generation": True}
    hub |= {f"base_model: {start}": bool(start) and not is_local(start)}
    ids = [name for name in data if not is_local(name) and "/" in name]
    lines = ["---", *(line for line, holds in hub.items() if holds)]
    lines += ["datasets:", *(f"- {name}" for name in ids)] if ids else []
    lines += ["tags:", "- picotron", "---", ""]

    last = {name: record[name] for record in records for name in ("loss", "eval_loss") if record.get(name) is not None}
    program = Path(sys.argv[0]).name
    weights = {name: f" (weight {weight:g})" if len(data) > 1 else "" for name, weight in data.items()}
    facts = {
        "model": f"{model_config.model_type}, {model_cost(model_config, training.seq_length).parameters:,} parameters",
        "training began with": public(start) if start else f"random weights, seed {training.seed}",
        "data": ", ".join(f"{public(name)}{weight}" for name, weight in weights.items()),
        "training": f"{progress.step:,} steps, {progress.tokens:,} tokens, {config.global_batch_size} sequences a step",
        "loss": f"{last['loss']:.4f} in the last step" if "loss" in last else "not recorded",
        "loss on held-out data": f"{last['eval_loss']:.4f}" if "eval_loss" in last else "not measured",
        "layout": layout,
        "command": f"`torchrun --nproc_per_node {ranks} {program} --config config.json`, with the config below",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    lines += [f"# {Path(config.checkpoint.save_dir).resolve().name}, step {progress.step}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {fact} |" for name, fact in facts.items()]
    keys = public(config.model_dump(mode="json", exclude_defaults=True, exclude=LEFT_OUT))
    return "\n".join([*lines, "", "```json", json.dumps(keys, indent=2), "```", ""])


def is_local(name: str) -> bool:
    """Return whether a name is that of a file, a folder or a pattern, and not of something on the Hub."""
    return os.path.exists(name) or name.startswith(("/", "~", ".")) or any(sign in name for sign in "*?[")


def public(value: Any) -> Any:
    """Return a value of a config, in which the names of files lack the folders of this machine in front of them."""
    if isinstance(value, dict):
        return {public(key): public(each) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    before = next((word for word in ("latest or ", "csv:") if value.startswith(word)), "")
    name = value.removeprefix(before)
    return before + (Path(name).name if is_local(name) else name)
