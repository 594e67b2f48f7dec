"""Folder of a run, `checkpoint.save_dir`: its files, and how a new run archives those of an earlier one.

    config.json  schedule.csv  metrics.jsonl  step_00000080/  step_00000160/  ...    trace_step_00000005.jsonl  ...
    completions.jsonl (of examples/grpo.py)    earlier.1/  earlier.2/  ...

A checkpoint folder with its final name is complete: it is written under another name, and renamed at the end.
"""

import contextlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from picotron.config import Config
from picotron.console import UserError
from workbench.console import is_rank_0
from workbench.files import delete, locked, parse_json, unfinished, write_atomically

logger = logging.getLogger("picotron")

CLAIM = contextlib.ExitStack()  # holds the lock of the folder; closed in forked processes, which may live longer
os.register_at_fork(after_in_child=CLAIM.close)
COMPLETIONS = "completions.jsonl"
Record = dict[str, Any]  # of a step, as in metrics.jsonl
LARGEST = 1e300  # number in a record, so that a mean of them is finite


def claim_save_dir(config: Config) -> None:
    """Create the folder for the outputs, and claim it for this run until its first process ends, however it ends, or
    closes `CLAIM`.

    Raises:
        UserError: the folder cannot be written, holds a model, is claimed by another run, or has a checkpoint that the
            run reads and would archive.
    """
    name = config.checkpoint.save_dir
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=name).close()
        existing = Path(name, "config.json")
        if existing.exists() and b'"model_type"' in existing.read_bytes():
            raise UserError(
                f"checkpoint.save_dir={name!r} is a model folder, and its config.json must be kept; choose another"
            )
        check_kept(config, {"model.name": config.model.name, "model.tokenizer": config.model.tokenizer})
        if is_rank_0():
            path, started = Path(name, ".run_lock"), time.strftime("%Y-%m-%d %H:%M:%S")
            if (lock := CLAIM.enter_context(locked(path))) is None:
                raise UserError(
                    f"checkpoint.save_dir={name!r} is being written by another run "
                    f"({path.read_text(errors='replace').strip()}); wait until it ends, or choose another folder"
                )
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}, started at {started}\n")
            lock.flush()
    except OSError as error:
        raise UserError(
            f"checkpoint.save_dir={name!r} cannot be written: {error.strerror}; choose another folder"
        ) from None


def check_kept(config: Config, folders: Mapping[str, str | None]) -> None:
    """Raise a UserError if a run reads a model or a tokenizer from a checkpoint that it archives, see `begin_run`.

    Args:
        folders: what the run reads, by the keys or options that name it.
    """
    save_dir, (latest, start) = config.checkpoint.save_dir, parse_load_path(config)
    checkpoints = {path.resolve() for path in checkpoint_folders(Path(save_dir)).values()}
    for key, name in folders.items():
        if Path(name or "").resolve() in checkpoints and not (latest or Path(start).resolve() in checkpoints):
            raise UserError(
                f"{key}={name!r} is in checkpoint.save_dir={save_dir!r}, where a new run moves earlier checkpoints "
                f"to another folder; choose another save_dir"
            )


def checkpoint_folder(save_dir: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return save_dir / f"step_{step:08d}"


def checkpoint_folders(save_dir: Path) -> dict[int, Path]:
    """Map the step of each complete checkpoint in `save_dir` to its folder, in ascending order."""
    names = [path.name[5:] for path in save_dir.glob(f"step_{8 * '[0-9]'}*")]
    steps = sorted(int(name) for name in names if name.isdecimal())
    return {step: checkpoint_folder(save_dir, step) for step in steps}


def parse_load_path(config: Config) -> tuple[bool, str]:
    """Return whether a run resumes from the newest checkpoint in its save_dir, and the folder from which it starts
    without one ("": initial weights).
    """
    load_path = config.checkpoint.load_path
    if load_path == "latest" or load_path.startswith("latest or "):
        return True, load_path.removeprefix("latest").removeprefix(" or ")
    return False, load_path


def start_of(config: Config) -> str:
    """Return the folder or hub id with whose weights a run begins, or "" if they are random."""
    return parse_load_path(config)[1] or (config.model.name if config.model.pretrained else "")


def delete_checkpoint(folder: Path) -> None:
    """Rename a checkpoint, then delete it: deletion is not atomic, and a half-deleted folder must not look complete.

    Failures are only logged.
    """
    try:
        delete(folder.rename(unfinished(folder)))
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", folder, error.strerror)


@contextlib.contextmanager
def user_error_on_failure(path: Path) -> Iterator[None]:
    """Context in which a failure to write to `path` raises a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; free some space, or choose another checkpoint.save_dir"
        ) from None


def check_record(record: Any, what: str) -> None:
    """Raise UserError if a record has no step, or a value that is not a number, nor None, or is too large to be
    plotted.
    """
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise UserError(f"{what} should be an object with an integer 'step'")
    for name, value in record.items():
        if value is not None and (type(value) not in (int, float) or abs(value) > LARGEST):
            raise UserError(f"{what} has {name}={value!r}; use a Python number of at most {LARGEST:g}, or null")


def write_record(path: Path, record: Record) -> None:
    """Append a record to a metrics.jsonl, which is closed after every step, so that a killed run keeps all its lines.

    Raises:
        UserError: the file cannot be written, or see `check_record`.
    """
    check_record(record, "the record of a step")
    with user_error_on_failure(path), open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def write_records(path: Path, records: list[Record]) -> None:
    """Write a metrics.jsonl."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def read_records(path: Path, field: str = "") -> tuple[list[Record], str]:
    """Read the records of a metrics.jsonl.

    Args:
        field: name of a field. Records without it are left out, which takes less time and memory than to parse them.

    Returns:
        The records, and the first problem of the file, or "". Damaged lines are skipped; a last line that a killed run
        left unfinished is not a problem.
    """
    try:
        with path.open("rb") as file:
            lines = [(i, each[:-1]) for i, each in enumerate(file, 1) if each[-1:] == b"\n" and field.encode() in each]
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], f"{path.name} cannot be read: {error.strerror}"
    records, problem = [], ""
    for number, line in lines:
        try:
            record = parse_json(line, f"line {number} of {path.name}")
            check_record(record, f"line {number} of {path.name}")
            records.append(record)
        except UserError as error:
            problem = problem or str(error)
    return records, problem


def new_archive_folder(folder: Path) -> Path:
    """Create a folder `earlier.N` in `folder`, for the files of earlier runs."""
    archive = next(path for n in itertools.count(1) if not (path := folder / f"earlier.{n}").exists())
    archive.mkdir()
    return archive


def begin_run(config: Config, resumed_step: int | None, searched: str | None = None) -> list[Record]:
    """Write config.json and schedule.csv, and archive the files of an earlier run in a folder `earlier.N`.

    Args:
        resumed_step: step of the checkpoint in save_dir from which this run resumes; files up to that step stay in
            place. None if this run does not resume an earlier one.
        searched: contents of schedule.csv, if the pipeline's schedule was searched. The file can be drawn, and used
            again with pp_engine "csv:FILE".

    Returns:
        All records of this run, if it resumes. metrics.jsonl keeps those up to `resumed_step`, and an archived one has
        those from `resumed_step` on. For wandb, the result includes records that an earlier resume has archived.

    Raises:
        UserError: the folder cannot be written.
    """
    save_dir, last = Path(config.checkpoint.save_dir), -1 if resumed_step is None else resumed_step
    names = ("metrics.jsonl", "config.json", "schedule.csv", COMPLETIONS)
    metrics, config_file, schedule_file, _ = files = [save_dir / name for name in names]
    by_step = [
        (path, re.fullmatch(r"(?:trace_)?step_([0-9]{8,})(?:\.jsonl)?", path.name)) for path in save_dir.glob("*step_*")
    ]
    old = [path for path, match in by_step if match and int(match[1]) > last]
    if resumed_step is None:
        old += [path for path in files if path.exists()]
    with user_error_on_failure(save_dir):
        all_records, problem = ([], "") if metrics in old else read_records(metrics)
        records = [record for record in all_records if record["step"] <= last]
        if old or problem or len(records) < len(all_records):
            archive = new_archive_folder(save_dir)
            for path in old:
                path.rename(archive / path.name)
            if problem:
                shutil.copy(metrics, archive)
            elif metrics.exists():
                write_records(archive / metrics.name, [each for each in all_records if each["step"] >= last])
            archived = ", ".join(sorted(path.name for path in archive.iterdir()))
            logger.info("files of an earlier run in %s are now in %s: %s", save_dir, archive, archived)
        if problem:
            logger.warning("%s: %s; damaged lines are left out, and kept in %s", save_dir, problem, archive)
        if metrics.exists():
            write_records(metrics, records)
        write_atomically(config_file, config.model_dump_json(indent=2) + "\n")
        schedule_file.unlink(missing_ok=True)
        if searched is not None:
            write_atomically(schedule_file, searched)
    archives = save_dir.glob("earlier.*/metrics.jsonl") if records and config.logging.use_wandb else ()
    archived_records = (read_records(path)[0] for path in archives)
    same = (records[:-1] + each[each.index(records[-1]) :] for each in archived_records if records[-1] in each)
    return max([all_records, *same], key=len)
