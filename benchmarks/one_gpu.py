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
from conformance.adapters.picotron import keys_of
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
LAYOUTS = (  # in the words of conformance/adapters/picotron.py
    *("pp2 tp2 sp", "cp2 dp2 zero3", "dp2 pp2 tp2 sp zero1", "pp2 cp2 tp2 sp", "dp2", "dp2 zero1", "dp2 zero3", "tp2"),
    *("tp2 sp", "cp2 ring", "cp2 all_gather", "cp2 ulysses", "pp2 afab", "pp2 1f1b", "pp2 interleaved_1f1b", "pp2 zbv"),
    "dp2 ep2",
)


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
    parser.add_argument("layout", help="such as pp2 zbv")
    parser.add_argument("--dtype", choices=LIMITS, default="float32")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    os.environ.update(SHARED)
    layout = keys_of(options.layout)
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
