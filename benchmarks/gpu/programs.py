"""The programs themselves: train.py, a run that resumes, and generate.py, as a user starts them."""

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.report import Content, Options, Outcome, Part, header, row

STEPS = 20


def programs(options: Options, folder: Path) -> dict[str, list[str]]:
    """Return the command lines, in order."""
    train = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "train.py"]
    keys = ["--config", "docs/small.json", "--checkpoint.save_dir", str(folder)]
    keys += ["--model.dtype", "bfloat16", "--distributed.use_cpu", str(not options.on_gpu).lower()]
    first = ["--training.total_train_steps", str(STEPS), "--checkpoint.save_frequency", str(STEPS // 2)]
    resumed = ["--training.total_train_steps", str(STEPS + 5), "--checkpoint.load_path", "latest"]
    prompt = ["--checkpoint", str(folder), "--prompt", "def f(x):", "--max_new_tokens", "16"]
    return {
        f"train.py, {STEPS} steps": [*train, *keys, *first],
        "train.py, resumed for 5 steps": [*train, *keys, *resumed],
        "generate.py": [sys.executable, "generate.py", *prompt],
    }


def run_programs(options: Options) -> Outcome:
    """Run all of them, and return a row for each: its seconds, and the last loss or the generated text."""
    lines = []
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "run")
        for name, command in programs(options, folder).items():
            start = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines.append(row([name, f"{time.monotonic() - start:.0f}", "**failed**"]))
                return Outcome(lines, f"{name}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
            if name == "generate.py":
                found = " ".join(done.stdout.split())[:80].replace("|", "/")
            else:
                records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                found = f"step {records[-1]['step']}, loss {records[-1]['loss']:.3f}"
            lines.append(row([name, f"{time.monotonic() - start:.0f}", f"`{found}`"]))
    return Outcome(lines)


def programs_section(options: Options) -> Content:
    """Return the section of the report."""
    return [
        "A tiny model in bfloat16 on the source code of Python's standard library, one process.",
        *header("program", "seconds", "result"),
        Part(["train.py and generate.py"], functools.partial(run_programs, options), 90),
    ]
