"""Train in a layout whose ranks share one GPU, or the CPU, and compare the losses with those of one rank:

    python -m benchmarks.one_gpu "pp2 tp2 sp" --dtype bfloat16 --compile

NCCL lets ranks share a GPU from version 2.30 on (NCCL_MULTI_RANK_GPU_ENABLE, experimental). This shows that the
numbers are right with real communicators, streams and handles, and twice the same to the last bit, which they are not
if a buffer is used again too early. It shows nothing about speed: the ranks take turns.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import train
from workbench.console import print_line
from workbench.run.config_reader import load_config
from workbench.run.launch import exit_on_error
from workbench.run.ranks import run_ranks

ON_GPU = torch.cuda.is_available()
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
LIMITS = {
    "float64": 1e-9,
    "float32": 2e-5,
    "float16": 5e-3,
    "bfloat16": 2e-2,
}  # relative difference of losses and norms
SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 tp2 sp": {"pp_size": 2, "tp_size": 2, **SEQUENCE},
    "cp2 dp2 zero3": {"cp_size": 2, "dp_size": 2, "dp_engine": "zero3"},
    "dp2 pp2 tp2 sp zero1": {"dp_size": 2, "pp_size": 2, "tp_size": 2, "dp_engine": "zero1", **SEQUENCE},
    "pp2 cp2 tp2 sp": {"pp_size": 2, "cp_size": 2, "tp_size": 2, **SEQUENCE},
    "dp2": {"dp_size": 2},
    "dp2 zero1": {"dp_size": 2, "dp_engine": "zero1"},
    "dp2 zero3": {"dp_size": 2, "dp_engine": "zero3"},
    "tp2": {"tp_size": 2},
    "tp2 sp": {"tp_size": 2, **SEQUENCE},
    "cp2 ring": {"cp_size": 2},
    "cp2 all_gather": {"cp_size": 2, "cp_engine": "all_gather"},
    "cp2 ulysses": {"cp_size": 2, "cp_engine": "ulysses"},
    "pp2 afab": {"pp_size": 2, "pp_engine": "afab"},
    "pp2 1f1b": {"pp_size": 2},
    "pp2 interleaved": {"pp_size": 2, "pp_engine": "interleaved_1f1b"},
    "pp2 zbv": {"pp_size": 2, "pp_engine": "zbv"},
    "dp2 ep2": {"dp_size": 2, "ep_size": 2},
}


def train_here(*arguments: Any) -> None:
    """Train on this rank, on the first GPU."""
    os.environ["LOCAL_RANK"] = "0"
    train.train(*arguments)


def losses(layout: dict[str, Any], folder: Path, dtype: str, compiled: bool) -> list[float]:
    """Train four steps. Returns their losses and gradient norms."""
    keys = {f"distributed.{key}": value for key, value in ({"use_cpu": not ON_GPU} | layout).items()} | {
        "model.dtype": dtype, "training.compile": compiled,
        "model.name": "docs/tiny-experts" if "ep_size" in layout else "template/tiny-llama", "model.num_hidden_layers": 4,
        "training.total_train_steps": 4, "training.micro_batch_size": 1, "training.seq_length": 256,
        "training.gradient_accumulation_steps": 8 // layout.get("dp_size", 1), "checkpoint.save_frequency": None,
        "checkpoint.save_dir": str(folder),
    }  # fmt: skip
    words = [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value).strip('"'))]
    config = load_config(["--config", "docs/small.json", *words])
    model_config, plan = train.check(config)
    run_ranks(config.distributed.world_size, functools.partial(train_here, config, model_config, plan))
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record[key] for record in records for key in ("loss", "grad_norm")]


def difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--dtype", choices=LIMITS, default="float32")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    os.environ.update(SHARED)
    layout = LAYOUTS[options.layout]
    alone = {"ep_size": 1} if "ep_size" in layout else {}
    with tempfile.TemporaryDirectory() as folder:
        one, first, second = (
            losses(each, Path(folder, str(i)), options.dtype, options.compile)
            for i, each in enumerate((alone, layout, layout))
        )
    worst, again = difference(first, one), "twice the same" if first == second else f"TWO RUNS DIFFER: {first, second}"
    print_line(f"{options.layout}: largest difference from one rank {worst:.1e}, {again}")
    if worst > LIMITS[options.dtype] or first != second:
        sys.exit(1)


if __name__ == "__main__":
    exit_on_error(main)
