"""Write the config of a run, or the configs of a sweep.

    python create_config.py --exp_name first --tp 2 --use_cpu             sweeps/first/config.json
    python create_config.py --exp_name sizes --tp 1 2 4 --mbs 1 2         sweeps/sizes/tp1_mbs1/config.json, ...

A config is the base config (template/base_config.json, or another file given by --config) with the values of the flags.
Every flag accepts several values. Each combination of values becomes a config, in a folder that is named after the keys
that vary. Combinations that train.py would reject are left out, with the reason. Nothing is ever deleted.

--world_size N writes a config for each layout whose product dp x pp x cp x tp is N. Without --dp, --pp, --cp and --tp,
these are all layouts of N processes. If some of the four are given, the others keep their sizes from the base config,
except dp, which becomes N / (pp x cp x tp).

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
from collections import Counter
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
    read_value,
    type_of,
    unknown_key,
)
from picotron.errors import UserError
from picotron.explain.estimate import Memory, bubble, rank_memory
from picotron.files import write_atomically
from picotron.json_files import read_object
from picotron.model_config import load_model_config
from picotron.parallelize import check_layout
from picotron.run_folder import new_archive_folder
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
from picotron.sweep.jobs import ACTIVE, Job
from picotron.text_table import text_table

GIB = 2**30


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Choices]:
    """Return the options, and the values of the given keys, in the order of FLAGS and then of the config."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --exp_name NAME [--out_dir DIR] [--config FILE] [--flag VALUE ...] ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--exp_name", required=True, help="name of the run or sweep, and of its folder in out_dir")
    parser.add_argument("--out_dir", default="sweeps", help="folder of all runs and sweeps [%(default)s]")
    parser.add_argument("--config", default="template/base_config.json", help="the base config [%(default)s]")
    parser.add_argument("--world_size", nargs="+", type=int, metavar="N", help="number of processes, see above")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace existing configs that differ, and archive them in earlier.N/"
    )
    descriptions = {GLOBAL_BATCH: "sequences per step, see above"} | leaf_keys()
    del descriptions["checkpoint.save_dir"]
    keys = list(dict.fromkeys([*FLAGS.values(), *descriptions]))
    short_flags = {key: f"--{flag}" for flag, key in FLAGS.items()}
    for key in keys:
        flags = dict.fromkeys([short_flags.get(key, f"--{key}"), f"--{key}"])
        text = descriptions[key].replace("%", "%%")
        parser.add_argument(*flags, dest=key, nargs="*", action="extend", metavar="VALUE", help=text)
    options, unknown_words = parser.parse_known_args(arguments)
    for word in unknown_words:
        reject(word)
    given = {key: words for key in keys if (words := getattr(options, key)) is not None}
    if {GLOBAL_BATCH, FLAGS["grad_acc_steps"]} <= given.keys():
        raise UserError("--global_batch_size already determines --grad_acc_steps; remove one of them")
    return options, {key: parse_values(key, words) for key, words in given.items()}


def reject(word: str) -> None:
    """Raise a UserError for an unknown argument. The text after `=` is not printed, because it may be a secret."""
    name = word.removeprefix("--").partition("=")[0]
    if re.fullmatch(r"(?i)(.*[._-])?token", name):
        raise UserError(
            f"--{name} is not accepted: configs hold no secrets; use `hf auth login`, or set HF_TOKEN in the shell"
        )
    if name == "checkpoint.save_dir":
        raise UserError(
            "--checkpoint.save_dir is not accepted: outputs go to the folder run/ next to each config.json; remove it"
        )
    if word.startswith("--") and "." in name:
        raise UserError(unknown_key(name))
    raise UserError(f"unexpected argument {word.partition('=')[0]!r}; create_config.py --help lists all arguments")


def parse_values(key: str, words: list[str]) -> list[Any]:
    """Parse the words after a flag. For a boolean key, no word means true."""
    if not words and type_of(key) is not bool:
        raise UserError(f"--{short_name(key)} needs a value")
    values = [read_value(key, word) for word in words] or [True]
    for value, count in Counter(map(canonical_json, values)).items():
        if count > 1:
            raise UserError(f"--{short_name(key)} contains {value} more than once; remove the duplicates")
    return values


def check_exp_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise UserError(
            f"--exp_name {name!r} should be the name of a folder, without a path; put its path in --out_dir"
        )


@dataclass(frozen=True)
class PlannedJob:
    """A job that can run.

    Args:
        data: the config as JSON, as it is written to the file.
        config: the config.
        memory: the estimated memory of each pp rank.
        bubble: the estimated idle fraction, 0 to 1.
    """

    job: Job
    data: dict[str, Any]
    config: Config
    memory: list[Memory]
    bubble: float


def plan_job(job: Job, base: dict[str, Any], combination: Combination) -> PlannedJob:
    """Make the config of a combination, check it as train.py does, and estimate its memory and bubble.

    Raises:
        UserError: train.py would reject the config.
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
    model_config = load_cached(config.model)
    if isinstance(model_config, UserError):
        raise model_config
    plan = check_layout(config, model_config)
    return PlannedJob(job, data, config, rank_memory(config, model_config, plan), bubble(config, model_config, plan))


@functools.cache
def load_cached(section: ModelSection) -> LlamaConfig | UserError:
    """Load a model's config. An error is returned, and thus cached: an unreachable hub takes long to fail."""
    try:
        return load_model_config(section)
    except UserError as error:
        return error


def accumulation_steps(global_batch_size: Any, config: Config) -> int:
    dp, mbs = config.distributed.dp_size, config.training.micro_batch_size
    if type(global_batch_size) is not int or global_batch_size < 1 or global_batch_size % (dp * mbs):
        raise UserError(
            f"global_batch_size={canonical_json(global_batch_size)} should be a positive multiple of {dp * mbs}, the "
            f"product of dp_size={dp} and micro_batch_size={mbs}"
        )
    return global_batch_size // (dp * mbs)


def write_configs(planned: Sequence[PlannedJob], folder: Path, overwrite: bool) -> int:
    """Write the configs that do not exist yet. With `overwrite`, archive the files of jobs whose configs differ.

    Returns:
        The number of existing configs that are equal to the planned ones.

    Raises:
        UserError: existing configs differ and may not be replaced, their jobs are active, or a sweep would share the
            folder of a single run. No config is written.
    """
    single, occupied = planned[0].job.folder == folder, (folder / "config.json").exists()
    if occupied and not single:
        raise UserError(f"{folder} already holds a single run; choose another --exp_name for the sweep")
    if single and not occupied and any(folder.glob("*/config.json")):
        raise UserError(f"{folder} already holds a sweep; choose another --exp_name for the single run")
    existing = [p for p in planned if p.job.config_file.exists()]
    different = [p.job for p in existing if read_or_none(p.job.config_file) != p.data]
    if different and not overwrite:
        raise UserError(
            f"{len(different)} existing configs differ from the new ones, such as {different[0].config_file}; "
            f"choose another --exp_name, or replace them with --overwrite"
        )
    for job in different:
        if job.status in ACTIVE:
            raise UserError(f"the job in {job.folder} is {job.status}; cancel it, or choose another --exp_name")
    for job in different:  # the outputs of a run are archived together with its config
        old_files = [path for path in job.folder.iterdir() if not path.name.startswith("earlier.")]
        archive = new_archive_folder(job.folder)
        for path in old_files:
            path.rename(archive / path.name)
    for p in planned:
        if not p.job.config_file.exists():
            p.job.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(p.job.config_file, json.dumps(p.data, indent=2) + "\n")
    return len(existing) - len(different)


def read_or_none(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None if it cannot be read."""
    try:
        return read_object(path)
    except UserError:
        return None


def table(planned: Sequence[PlannedJob]) -> str:
    """Format the layout, batch, bubble and memory of each job; memory is that of the rank that needs most."""
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
            f"{heaviest.state / GIB:.3f} + {(heaviest.total - heaviest.state) / GIB:.3f} = {heaviest.total / GIB:.3f}",
        ))  # fmt: skip
    return text_table(rows)


def create(options: argparse.Namespace, choices: Choices) -> None:
    """Plan all combinations, write their configs, and print the table."""
    check_exp_name(options.exp_name)
    base = drop_ignored_keys(read_object(Path(options.config)))
    folder = Path(options.out_dir, options.exp_name)
    chosen = combinations(choices, options.world_size, base)
    planned = []
    for combination, name in zip(chosen, folder_names(chosen), strict=True):
        try:
            planned.append(plan_job(Job(folder / name, name or options.exp_name), base, combination))
        except UserError as error:
            if len(chosen) == 1:
                raise
            print(f"left out {name}: {'; '.join(error.problems)}")
    if not planned:
        raise UserError(f"none of the {len(chosen)} combinations can run; the reasons are printed above")
    unchanged = write_configs(planned, folder, options.overwrite)
    print(table(planned))
    print(
        "(GiB/rank: weights, gradients and optimizer + activations and temporary tensors, on the rank that needs most; "
        f"formulas in picotron/explain/estimate.py)\n\n{len(planned)} configs in {folder}: {len(planned) - unchanged} written, "
        f"{unchanged} unchanged; {len(chosen) - len(planned)} of {len(chosen)} combinations left out. "
        "To run them on this machine:"
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
