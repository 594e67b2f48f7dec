"""The rules of the code base that a program can check."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = sorted(Path("picotron").rglob("*.py"))
PARALLEL = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
# Layers of the package, from bottom to top. A module or folder imports only from lower lines, or from its own folder.
LAYERS = """
    console
    files
    schedules
    drawing config
    config_checks process_group_manager collectives
    command_line
    model
    run
    tensor_parallel context_parallel pipeline_parallel data_parallel
    data optimizer
    parallelize train_step
    checkpoint check_batches
    batches generation
    sequences trainer
    explain
    sweep
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}


class WithoutTypes(ast.NodeTransformer):
    """Removes what only type checkers import."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def imports(path: Path) -> Iterator[str]:
    """The dotted names of everything that a file imports when it runs, also inside of functions."""
    for node in ast.walk(WithoutTypes().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms(path: Path) -> set[str]:
    """The modules and folders of the package that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("picotron.")}


def room_of(path: Path) -> str:
    return path.relative_to("picotron").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [path for path in PACKAGE if path.read_text()], ids=str)
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert {other for other in rooms(path) - {room} if LEVEL[other] >= LEVEL[room]} == set()


def test_parallel_folders_do_not_import_each_other() -> None:
    for path in PACKAGE:
        if room_of(path) in PARALLEL:
            assert rooms(path) & set(PARALLEL) <= {room_of(path)}, path


def test_schedules_import_only_the_standard_library() -> None:
    """So schedules can be built, checked, timed and drawn wherever Python runs."""
    for path in [*Path("picotron/schedules").glob("*.py"), *Path("picotron/drawing").glob("*.py")]:
        others = {name.split(".")[0] for name in imports(path)} - {"picotron"}
        assert others <= sys.stdlib_module_names, path
        assert rooms(path) <= {"console", "files", "schedules", "drawing"}, path


@pytest.mark.processes
def test_light_programs_do_not_import_torch() -> None:
    """Programs that read what runs have written, or estimate, start without torch."""
    light = "picotron.explain.estimate, picotron.explain.forecast, picotron.sweep.combinations, extract_metrics"
    program = f"import sys, picotron.drawing.__main__, {light}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "matplotlib"} & set(done.stdout.split())


def test_only_torchrun_and_secrets_come_from_the_environment() -> None:
    allowed = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"}
    allowed |= {"TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"}
    for path in [*PACKAGE, Path("train.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                assert ast.literal_eval(node.args[0]) in allowed, path
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                assert ast.literal_eval(node.slice) in allowed, path
