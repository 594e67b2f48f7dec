"""Hand on the model of a checkpoint: python -m workbench.export CHECKPOINT FOLDER

FOLDER gets the model, its tokenizer and its card (README.md), without the state of the training, which is up to two
thirds of a checkpoint. Files are hard links where possible, so they take no space. Then, for example,

    hf upload ORGANISATION/NAME FOLDER
"""

import argparse
import os
import shutil
from pathlib import Path

from picotron.console import UserError
from workbench.console import Parser, print_line
from workbench.files import new_folder
from workbench.run.checkpoint.checkpoint import STATE_FILE, check_files, is_of_optimizer, read_state
from workbench.run.launch import exit_on_error
from workbench.run.run_folder import user_error_on_failure


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
    return sum(path.stat().st_size for path in files)


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
