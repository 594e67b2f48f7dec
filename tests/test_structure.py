"""The rules of the code base that a tool can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = sorted(Path("picotron").rglob("*.py"))
FOLDERS = ("picotron", "tests", "docs", "benchmarks")
EVERYTHING = sorted([*Path().glob("*.py"), *(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))])
PARALLEL = ("tensor_parallel", "context_parallel", "data_parallel", "pipeline_parallel")
# From the bottom to the top: a module imports only modules of lower levels. `utils` may be used from level 2 on.
LEVELS = {
    "config": 0, "config_reader": 1, "process_group_manager": 1, "utils": 1, "run_folder": 1, "jobs": 1, "split_backward": 1,
    "slurm": 2, "local_jobs": 2, "sweep": 2, "fake_group": 2, "model": 2, "weights": 3, "tokens": 4, "data": 4, "optimizer": 4,
    "safetensors_folder": 4, **dict.fromkeys(PARALLEL, 4), "checkpoint": 5, "stage_files": 5, "check": 5, "estimate": 5,
    "checkpoint_writer": 6, "metrics": 6, "explain": 7,
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """The second part of each `picotron.X` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "picotron":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("picotron."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("picotron.")}
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=str)
def test_imports_point_down(path: Path) -> None:
    module = path.relative_to("picotron").parts[0].removesuffix(".py")
    if module == "__init__":
        return
    for other in imported(path) - {module}:
        assert LEVELS[other] < LEVELS[module], f"{path} imports {other}"
    if module in PARALLEL:
        assert not imported(path) & (set(PARALLEL) - {module})


@pytest.mark.parametrize("path", EVERYTHING, ids=str)
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (160 if path.name == "train.py" else 300)


@pytest.mark.parametrize("path", [*PACKAGE, Path("train.py")], ids=str)
def test_only_torchrun_and_secrets_come_from_the_environment(path: Path) -> None:
    allowed = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TOKENIZERS_PARALLELISM"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            assert ast.literal_eval(node.args[0]) in allowed
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            assert ast.literal_eval(node.slice) in allowed


def test_schedules_can_be_thought_about_without_torch() -> None:
    """What describes, checks, times and draws a schedule, or reads what runs have left, starts in no time, and needs
    neither torch nor processes.
    """
    modules = (
        "actions",
        "schedules",
        "checker",
        "schedule_csv",
        "simulate",
        "layout",
        "trace",
        "draw_svg",
        "draw",
        "plan",
    )
    imports = "; ".join(f"import picotron.pipeline_parallel.{module}" for module in modules)
    imports += "; import picotron.sweep, picotron.explain.estimate, extract_metrics"
    heavy = "{'torch', 'transformers', 'numpy', 'matplotlib', 'picotron.process_group_manager'}"
    command = f"import sys; {imports}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "[]\n"
