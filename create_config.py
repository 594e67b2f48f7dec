"""Write the config of a run, or the configs of a sweep.

    python create_config.py --exp_name first --tp 2 --use_cpu             sweeps/first/config.json
    python create_config.py --exp_name sizes --tp 1 2 4 --mbs 1 2         sweeps/sizes/tp1_mbs1/config.json, ...

A config is the base config (template/base_config.json, or another file given by --config) with the values of the flags.
Every flag accepts several values. Each combination of values becomes a config, in a folder that is named after the keys
that vary. Combinations that train.py would reject are left out, with the reason. Nothing is ever deleted.

--world_size N writes a config for each layout whose product dp x pp x cp x tp is N. Without --dp, --pp, --cp and --tp,
these are all layouts of N processes; for a model with experts, and without --ep, each of them with all values of ep
that divide dp x cp and the number of experts. If some of the four are given, the others keep their sizes from the base
config, except dp, which becomes N / (pp x cp x tp).

--global_batch_size G, in sequences per step, sets gradient_accumulation_steps to G / (dp x mbs).

--hardware NAME adds a forecast of each config's speed to the table and to its folder. Unless --use_cpu says otherwise,
the configs are for this hardware. On a GPU, the dtype of the template becomes bfloat16, unless --model.dtype is given.

--best N, with --world_size and --global_batch_size, writes the N fastest layouts that fit into the memory of a device
(--gib), each with its fastest settings. Without --hardware, it measures this machine. It tries all sizes of the axes,
and of keys that are not given: micro-batches of 1 to 8 sequences, activation checkpointing of each kind, dp_engine
bucket, zero1 and zero3, numbers of chunks, and each pp_engine but afab, looped_bfs and dualpipev, which need more
memory than others and no less time. With tp above 1, sequence_parallel is on unless it is given.
"""

import argparse
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from picotron.console import UserError
from workbench.console import number, print_line
from workbench.explain.forecast_errors import describe_errors
from workbench.explain.hardware import Hardware, usable
from workbench.explain.measure import find_hardware
from workbench.files import read_object, write_atomically
from workbench.run.config_reader import leaf_keys, read_config, read_value, type_of, unknown_key
from workbench.run.model_config import load_model_config
from workbench.run.run_folder import new_archive_folder
from workbench.sweep.combinations import (
    AXES,
    FLAGS,
    GLOBAL_BATCH,
    Choices,
    Combination,
    canonical_json,
    combinations,
    folder_names,
    short_name,
)
from workbench.sweep.jobs import ACTIVE, Job
from workbench.sweep.planned_jobs import PlannedJob, candidates, make_config, plan_job, table, with_ep_sizes
from workbench.sweep.planner import best_configs

TEMPLATE = "template/base_config.json"


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
    parser.add_argument("--config", help=f"the base config [{TEMPLATE}]")
    parser.add_argument("--world_size", nargs="+", type=int, metavar="N", help="number of processes, see above")
    text = "forecast speeds on H100, H200, A100, L40S, RTX4090, this or a JSON file"
    parser.add_argument("--hardware", metavar="NAME", help=text)
    parser.add_argument("--best", type=number(int, 1), metavar="N", help="write only the N fastest layouts, see above")
    parser.add_argument("--gib", type=number(float, 0), help="memory of a device [that of the hardware]")
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
        raise UserError(f"--{key} needs a value")
    values = [read_value(key, word) for word in words] or [True]
    for value, count in Counter(map(canonical_json, values)).items():
        if count > 1:
            raise UserError(f"--{key} contains {value} more than once; remove the duplicates")
    return values


def check_exp_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise UserError(
            f"--exp_name {name!r} should be the name of a folder, without a path; put its path in --out_dir"
        )


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
        p.write_forecast()
    return len(existing) - len(different)


def read_or_none(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None if it cannot be read."""
    try:
        return read_object(path)
    except UserError:
        return None


def memory_of(options: argparse.Namespace, hardware: Hardware | None) -> float | None:
    """Return the GiB of a device; None if they are unknown."""
    return hardware.gib if options.gib is None and hardware is not None else options.gib


def check_best(options: argparse.Namespace, choices: Choices) -> None:
    """Raise a UserError unless the layouts that `--best` compares do the same work."""
    if options.world_size is None or len(options.world_size) > 1 or len(choices.get(GLOBAL_BATCH, [])) != 1:
        raise UserError("--best compares layouts of one size and one batch: give --world_size and --global_batch_size")
    for key, values in choices.items():
        if len(values) > 1 and (key.startswith("model.") or key == "training.seq_length"):
            raise UserError(
                f"--best compares layouts of one model: give one value of --{short_name(key)}, not {len(values)}"
            )


def find_best(
    options: argparse.Namespace, choices: Choices, base: dict[str, Any], hardware: Hardware
) -> list[Combination]:
    """Return the combinations that `--best` asks for, best first."""
    tried = list(candidates(base, combinations(choices, options.world_size, base)))
    if not tried:
        raise UserError(
            f"no layout of {options.world_size[0]} ranks can train this model with this batch; change one of them"
        )
    model_config = load_model_config(tried[0][1].model)
    gib = memory_of(options, hardware)
    assert gib is not None
    best, least = best_configs(tried, model_config, hardware, gib, options.best)
    if not best:
        text = ", ".join(f"{short_name(key)} {value}" for key, value in least.values.items())
        raise UserError(
            f"no layout of {options.world_size[0]} ranks fits into {usable(gib)}; the smallest one needs more than "
            f"{least.gib:.3g} GiB: {text}; use more ranks, or training.optimizer_states that need less"
        )
    print_line(
        f"{len(tried):,} combinations of {options.world_size[0]} ranks can run; these are the fastest layouts that fit into "
        f"{usable(gib)}."
    )
    return best


def for_hardware(hardware: Hardware, choices: Choices, from_template: bool) -> Choices:
    """Return the choices with the device of the hardware. The template is for CPUs, so a GPU also needs its dtype."""
    defaults: Choices = {"distributed.use_cpu": [hardware.cores is not None]}
    if from_template and hardware.cores is None:
        defaults["model.dtype"] = ["bfloat16"]
    return choices | {key: values for key, values in defaults.items() if key not in choices}


def header(planned: Sequence[PlannedJob], hardware: Hardware) -> str:
    """Return what all forecasts assume."""
    dtypes = " and ".join(dict.fromkeys(p.config.model.dtype for p in planned))
    shared = "" if hardware.cores is None else f", whose cores compute {hardware.cores} ranks at a time"
    lines = [f"Forecast in {dtypes} on {hardware.name}{shared}:"]
    if hardware.cores is None:
        overlap = "where another computation hides them, except over tp and in ZeRO-3"
        lines.insert(0, f"Forecasts assume that messages cost nothing {overlap} (workbench/explain/step_time.py).")
        errors = dict.fromkeys(describe_errors(p.config, hardware, layout=False) for p in planned)
        lines[1:1] = "\n".join(errors).splitlines()
    return "\n".join(lines)


def runs_here(planned: Sequence[PlannedJob]) -> bool:
    """Return whether this machine has the GPUs for all configs. (Processes can share the cores of a CPU.)"""
    gpus = torch.cuda.device_count()
    return all(p.config.distributed.use_cpu or p.config.distributed.world_size <= gpus for p in planned)


def create(options: argparse.Namespace, choices: Choices) -> None:
    """Plan all combinations, or the best ones, write their configs, and print the table."""
    check_exp_name(options.exp_name)
    base = read_config(Path(options.config or TEMPLATE))
    folder = Path(options.out_dir, options.exp_name)
    hardware = None
    if options.best is not None:
        check_best(options, choices)
        options.hardware = options.hardware or "this"
    if options.hardware is not None:
        on_device = ("distributed.use_cpu", "environment.OMP_NUM_THREADS")
        _, config = make_config(base, {key: choices[key][0] for key in on_device if key in choices})
        hardware = find_hardware(options.hardware, config)
        choices = for_hardware(hardware, choices, options.config is None)
    if options.best is None:
        chosen = combinations(choices, options.world_size, base)
        if options.world_size is not None and not choices.keys() & {*AXES.values(), FLAGS["ep"]}:
            chosen = list(with_ep_sizes(base, chosen))
    else:
        assert hardware is not None
        chosen = find_best(options, choices, base, hardware)
    planned = []
    for combination, name in zip(chosen, folder_names(chosen, brief=options.best is not None), strict=True):
        try:
            planned.append(plan_job(Job(folder / name, name or options.exp_name), base, combination, hardware))
        except UserError as error:
            if len(chosen) == 1:
                raise
            print_line(f"left out {name}: {'; '.join(error.problems)}")
    if not planned:
        raise UserError(f"none of the {len(chosen)} combinations can run; the reasons are printed above")
    unchanged = write_configs(planned, folder, options.overwrite)
    if hardware is not None:
        print_line(header(planned, hardware))
    if options.best is not None:
        shared = {key: each for key, each in chosen[0].items() if all(other.get(key) == each for other in chosen)}
        print_line("all: " + ", ".join(f"{short_name(key)} {value}" for key, value in shared.items()))
    print_line(table(planned, brief=options.best is not None, gib=memory_of(options, hardware)))
    print_line(
        f"({'' if options.best else 'sequences/step: dp x micro-batch x micro-batches. '}GiB/rank, on the rank that needs most: "
        f"weights, gradients and\noptimizer + activations and temporary tensors; formulas in workbench/pipelines/memory.py)\n\n"
        f"{len(planned)} configs in {folder}: {len(planned) - unchanged} written, "
        f"{unchanged} unchanged; {len(chosen) - len(planned)} of {len(chosen)} combinations left out. "
        f"To {'run them on this machine' if runs_here(planned) else 'submit them to Slurm'}:"
    )
    program = os.path.relpath(Path(__file__).with_name("submit_slurm_jobs.py"))
    command = [os.path.relpath(sys.executable), program, "--inp_dir", str(folder)]
    print_line(shlex.join([*command, "--local"] if runs_here(planned) else command))


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        create(*parse_arguments(arguments))
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename} cannot be written: {error.strerror}; choose another --out_dir or --exp_name")


if __name__ == "__main__":
    main()
