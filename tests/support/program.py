"""Run train.py as a user does, and read its metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node"]


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python train.py`, with environment variables."""
    environment = {**os.environ, "HOME": str(home), **variables}
    return subprocess.run(
        [sys.executable, "train.py", "--config", "template/base_config.json", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )


def arguments(save_dir: Path, dp: int, batch: int, **more: Any) -> list[str]:
    keys = {
        "distributed.dp_size": dp, "distributed.tp_size": 1, "distributed.pp_size": 1, "model.dtype": "float64", "model.num_hidden_layers": 2, "training.total_train_steps": 4,
        "training.num_samples": 100,
        "training.seq_length": 64, "training.micro_batch_size": batch, "training.gradient_accumulation_steps": 2,
        "training.warmup_steps": 2, "training.eval_frequency": 2, "training.eval_steps": 1, "checkpoint.save_dir": save_dir, **more,
    }  # fmt: skip
    return [str(word) for key, value in keys.items() for word in (f"--{key}", value)]


def metrics(save_dir: Path) -> list[dict[str, Any]]:
    """Return the records of the steps, without the evaluation before the first one."""
    records = [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["step"] > 0]
