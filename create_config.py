"""Make the config of a run, or those of a sweep.

    python create_config.py --exp_name first --tp 2 --use_cpu             sweeps/first/config.json
    python create_config.py --exp_name sizes --tp 1 2 4 --mbs 1 2         sweeps/sizes/tp1_mbs1/config.json, ...

A config is template/base_config.json, or another --config, with what the flags change. Any flag takes several values:
then there is a config for each combination, in a folder that is named by what varies. A combination that train.py would
refuse is left out, and it is said why. Nothing is ever deleted.

--world_size N keeps layouts that multiply to N: all there are, if none of --dp --pp --cp --tp is given. Else an axis
that is not given has its size in the base config, but for dp, which is then N / (pp x cp x tp).

--global_batch_size G, in sequences per step, sets gradient_accumulation_steps to G / (dp x mbs).
"""

import argparse
import copy
import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from picotron.config import Config
from picotron.config import Model as ModelSection
from picotron.config_reader import (
    drop_ignored_keys,
    leaf_keys,
    override,
    parse_config,
    read_json,
    read_value,
    type_of,
    unknown,
)
from picotron.errors import UserError
from picotron.explain.estimate import Memory, bubble, rank_memory
from picotron.model import load_model_config
from picotron.parallelize import check_layout
from picotron.run_folder import new_archive_folder, write_atomically
from picotron.sweep.combinations import (
    FLAGS,
    GLOBAL_BATCH,
    Choices,
    Combination,
    canonical_json,
    combinations,
    folder_names,
    short_name,
)
from picotron.sweep.jobs import ALIVE, Job
from picotron.text_table import text_table

GIB = 2**30


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Choices]:
    """The options, and the values of the keys that are given, in the order of FLAGS and then of the config."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --exp_name NAME [--out_dir DIR] [--config FILE] [--flag VALUE ...] ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--exp_name", required=True, help="name of the run or sweep: a folder in out_dir")
    parser.add_argument("--out_dir", default="sweeps", help="[%(default)s]")
    parser.add_argument("--config", default="template/base_config.json", help="what to start from [%(default)s]")
    parser.add_argument("--world_size", nargs="+", type=int, metavar="N", help="number of processes, see above")
    parser.add_argument("--overwrite", action="store_true", help="replace other configs; what was there: earlier.N/")
    help_of = {GLOBAL_BATCH: "sequences per step, see above"} | leaf_keys()
    del help_of["checkpoint.save_dir"]
    keys = list(dict.fromkeys([*FLAGS.values(), *help_of]))
    known = {key: f"--{flag}" for flag, key in FLAGS.items()}
    for key in keys:
        words = dict.fromkeys([known.get(key, f"--{key}"), f"--{key}"])
        text = help_of[key].replace("%", "%%")
        parser.add_argument(*words, dest=key, nargs="*", action="extend", metavar="VALUE", help=text)
    options, others = parser.parse_known_args(arguments)
    for word in others:
        refuse(word)
    given = {key: words for key in keys if (words := getattr(options, key)) is not None}
    if {GLOBAL_BATCH, FLAGS["grad_acc_steps"]} <= given.keys():
        raise UserError("--grad_acc_steps is what follows from --global_batch_size; leave out one of them")
    return options, {key: values_of(key, words) for key, words in given.items()}


def refuse(word: str) -> None:
    """Raises UserError for an argument that is none. What is behind a = is not shown: it may be a secret."""
    name = word.removeprefix("--").partition("=")[0]
    if re.fullmatch(r"(?i)(.*[._-])?token", name):
        raise UserError(
            f"--{name} is not taken, as configs hold no secrets: use `hf auth login`, or set HF_TOKEN in the shell"
        )
    if name == "checkpoint.save_dir":
        raise UserError("--checkpoint.save_dir is not taken: outputs go to the folder run/ beside each config.json")
    if word.startswith("--") and "." in name:
        raise UserError(unknown(name))
    raise UserError(f"unexpected argument {word.partition('=')[0]!r}; create_config.py --help lists all there are")


def values_of(key: str, words: list[str]) -> list[Any]:
    """What the words behind a flag stand for. A switch alone means true."""
    if not words and type_of(key) is not bool:
        raise UserError(f"--{short_name(key)} needs a value")
    values = [read_value(key, word) for word in words] or [True]
    for i, value in enumerate(values):
        if canonical_json(value) in map(canonical_json, values[:i]):
            raise UserError(f"--{short_name(key)} has {canonical_json(value)} more than once; leave out all but one")
    return values


def check_exp_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise UserError(f"--exp_name {name!r} should be the name of one folder; put the path to it in --out_dir")


@dataclass(frozen=True)
class Planned:
    """A job that can run.

    Args:
        data: its config, as it is written.
        memory: by pipeline rank.
    """

    job: Job
    data: dict[str, Any]
    config: Config
    memory: list[Memory]
    bubble: float


def plan_job(job: Job, base: dict[str, Any], combination: Combination) -> Planned:
    """
    Raises:
        UserError: train.py would refuse it.
    """
    data = copy.deepcopy(base)
    for key, value in combination.items():
        if key != GLOBAL_BATCH:
            override(data, key, value)
    override(data, "checkpoint.save_dir", str(job.run_folder))
    config = parse_config(data)
    if GLOBAL_BATCH in combination:
        override(data, FLAGS["grad_acc_steps"], accumulation_steps(combination[GLOBAL_BATCH], config))
        config = parse_config(data)
    model_config = model_config_of(config.model)
    if isinstance(model_config, UserError):
        raise model_config
    plan = check_layout(config, model_config)
    return Planned(job, data, config, rank_memory(config, model_config, plan), bubble(config, model_config, plan))


@functools.cache
def model_config_of(section: ModelSection) -> LlamaConfig | UserError:
    """Failures are remembered, too: a hub that cannot be reached takes its time to say so."""
    try:
        return load_model_config(section)
    except UserError as error:
        return error


def accumulation_steps(global_batch_size: Any, config: Config) -> int:
    dp, mbs = config.distributed.dp_size, config.training.micro_batch_size
    if type(global_batch_size) is not int or global_batch_size < 1 or global_batch_size % (dp * mbs):
        raise UserError(
            f"global_batch_size={canonical_json(global_batch_size)} is not a multiple of the {dp * mbs} sequences that "
            f"dp_size={dp} x micro_batch_size={mbs} take at a time"
        )
    return global_batch_size // (dp * mbs)


def write(planned: Sequence[Planned], folder: Path, overwrite: bool) -> int:
    """Write the configs that are not there yet; or, if others are in their place, none.

    Returns:
        How many were there.

    Raises:
        UserError: others are there.
    """
    single, occupied = planned[0].job.folder == folder, (folder / "config.json").exists()
    if occupied and not single:
        raise UserError(f"{folder} is that of a single run; choose another --exp_name for a sweep")
    if single and not occupied and any(folder.glob("*/config.json")):
        raise UserError(f"{folder} is that of a sweep; choose another --exp_name for a single run")
    there = [p for p in planned if p.job.config_file.exists()]
    different = [p.job for p in there if read_or_none(p.job.config_file) != p.data]
    if different and not overwrite:
        raise UserError(
            f"there are {len(different)} other configs already, as {different[0].config_file}; choose another --exp_name, "
            f"or replace them by --overwrite"
        )
    for job in different:
        if job.status in ALIVE:
            raise UserError(f"the job in {job.folder} is {job.status}; cancel it, or choose another --exp_name")
    for job in different:  # what a run has left belongs to the config it had
        left = [path for path in job.folder.iterdir() if not path.name.startswith("earlier.")]
        earlier = new_archive_folder(job.folder)
        for path in left:
            path.rename(earlier / path.name)
    for p in planned:
        if not p.job.config_file.exists():
            p.job.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(p.job.config_file, json.dumps(p.data, indent=2) + "\n")
    return len(there) - len(different)


def read_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(str(path))
    except UserError:
        return None


def table(planned: Sequence[Planned]) -> str:
    """Per run its layout and what it takes; memory as weights, gradients and optimizer + activations."""
    rows = [("", "dp pp cp tp", "sequences/step", "tokens/step", "parameters/rank", "bubble", "GiB/rank")]
    for p in planned:
        layout, training = p.config.distributed, p.config.training
        dp, mbs, steps = layout.dp_size, training.micro_batch_size, training.gradient_accumulation_steps
        heaviest = max(p.memory, key=lambda memory: memory.total)
        rows.append((
            p.job.name,
            f"{dp:2} {layout.pp_size:2} {layout.cp_size:2} {layout.tp_size:2}",
            f"{p.config.global_batch_size} = {dp} x {mbs} x {steps}",
            f"{p.config.global_batch_size * training.seq_length:,}",
            f"{max(memory.parameters for memory in p.memory):,}",
            f"{p.bubble:.1%}",
            f"{heaviest.state / GIB:.3f} + {heaviest.activations / GIB:.3f} = {heaviest.total / GIB:.3f}",
        ))  # fmt: skip
    return text_table(rows)


def create(options: argparse.Namespace, choices: Choices) -> None:
    check_exp_name(options.exp_name)
    base = drop_ignored_keys(read_json(options.config))
    folder = Path(options.out_dir, options.exp_name)
    found = combinations(choices, options.world_size, base)
    planned = []
    for combination, name in zip(found, folder_names(found), strict=True):
        try:
            planned.append(plan_job(Job(folder / name, name or options.exp_name), base, combination))
        except UserError as error:
            if len(found) == 1:
                raise
            print(f"left out {name}: {'; '.join(error.problems)}")
    if not planned:
        raise UserError(f"none of the {len(found)} combinations can run")
    there = write(planned, folder, options.overwrite)
    print(table(planned))
    print(
        "(GiB of the heaviest rank: weights, gradients and optimizer + activations; picotron/estimate.py has the formulas)\n"
        f"\n{len(planned)} configs in {folder}: {len(planned) - there} written, {there} there already; "
        f"{len(found) - len(planned)} of {len(found)} combinations left out. To run them on this machine:"
    )
    print(shlex.join([os.path.relpath(sys.executable), "submit_slurm_jobs.py", "--inp_dir", str(folder), "--local"]))


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        create(*parse_arguments(arguments))
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename} cannot be written: {error.strerror}; choose another --out_dir or --exp_name")


if __name__ == "__main__":
    main()
