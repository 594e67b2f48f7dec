"""Hand on the model of a checkpoint: python -m workbench.export CHECKPOINT FOLDER

FOLDER gets the model, its tokenizer and a card (README.md), without the state of the training, which is up to two
thirds of a checkpoint. Files are hard links where possible, so they take no space. Then, for example,

    hf upload ORGANISATION/NAME FOLDER
"""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from picotron.console import UserError
from workbench.console import Parser, print_line
from workbench.files import new_folder
from workbench.run.checkpoint.checkpoint import STATE_FILE, TrainerState, check_files, is_of_optimizer, read_state
from workbench.run.config_reader import parse_config
from workbench.run.launch import exit_on_error
from workbench.run.run_folder import read_records, start_of, user_error_on_failure

LEFT_OUT = {"checkpoint", "logging", "environment"}  # sections that say nothing about the model


def export(checkpoint: Path, folder: Path) -> int:
    """Fill a new folder with the files of a checkpoint's model. Returns their number of bytes.

    Raises:
        UserError: the checkpoint is damaged, or the folder exists or cannot be written.
    """
    if (state := read_state(checkpoint)) is None:
        raise UserError(f"{checkpoint} has no {STATE_FILE}; only a checkpoint needs this program")
    check_files(checkpoint, state.model_files)
    if folder.exists():
        raise UserError(f"{folder} exists; choose another folder")
    files = [
        path
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != STATE_FILE and not is_of_optimizer(path.name)
    ]
    with user_error_on_failure(folder), new_folder(folder) as new:
        for path in files:
            target = new / path.relative_to(checkpoint)
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, target)
        (new / "README.md").write_text(model_card(state, checkpoint.resolve().parent))
    return sum(path.stat().st_size for path in files)


def model_card(state: TrainerState, run: Path) -> str:
    """Return the text of a README.md for the Hugging Face Hub. It names no folders of this machine.

    Args:
        run: folder of the run.
    """
    config, records = parse_config(state.config), read_records(run / "metrics.jsonl")[0]
    start = start_of(config) if state.start is None else state.start
    names = [start, *config.dataset.weights]
    on_hub = [name for name in names if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not os.path.exists(name)]
    hub = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["picotron"],
        base_model=start if start in on_hub else None,
        datasets=[name for name in config.dataset.weights if name in on_hub] or None,
    )
    record = {key: value for each in records if each["step"] == state.step for key, value in each.items()}
    facts: dict[str, Any] = {
        "training began with": start or "random weights",
        **state.model_dump(include={"step", "tokens", "layout", "versions"}),
        **{key: record[key] for key in ("loss", "eval_loss") if key in record},
        "config": config.model_dump(mode="json", exclude_defaults=True, exclude=LEFT_OUT),
    }
    # the names of files without their folders
    text = re.sub(r'"(csv:)?[/~.][^"]*/', r'"\1', json.dumps(facts, indent=2))
    return f"---\n{hub.to_yaml()}\n---\n\n# {run.name}, step {state.step}\n\n```json\n{text}\n```\n"


def link_or_copy(path: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy if it can be edited or the link is impossible, as on another disk."""
    try:
        if path.suffix == ".safetensors":
            os.link(path.resolve(), target)
            return
    except OSError:
        pass
    shutil.copyfile(path, target)


def main() -> None:
    parser = Parser(
        prog="python -m workbench.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a checkpoint, step_...")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder")
    options = parser.parse_args()
    size = export(options.checkpoint, options.folder)
    print_line(f"{options.folder}: {size / 1e9:.3g} GB")


if __name__ == "__main__":
    exit_on_error(main)
