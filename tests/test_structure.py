"""The rules of the code base that a program can check."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = sorted([*Path("picotron").rglob("*.py"), *Path("workbench").rglob("*.py")])
PARALLEL = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
# Layers, from bottom to top: the trainer, and the workbench on it. A room, which is a module or a folder of modules,
# imports only from lower lines, or from itself.
LAYERS = """
    picotron.console
    picotron.config
    picotron.process_group_manager picotron.collectives
    picotron.model
    picotron.tensor_parallel picotron.context_parallel picotron.data_parallel
    picotron.data picotron.optimizer
    picotron.pipeline_parallel
    picotron.parallelize

    workbench.console
    workbench.files
    workbench.run
    workbench.variants
    workbench.schedules workbench.prepare workbench.export
    workbench.drawing workbench.pipelines
    workbench.own_loops workbench.generation
    workbench.explain
    workbench.sweep
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
    """The rooms of both floors that a file imports from."""
    names = (name.split(".") for name in imports(path))
    return {f"{name[0]}.{name[1]}" for name in names if name[0] in ("picotron", "workbench")}


def room_of(path: Path) -> str:
    return f"{path.parts[0]}.{path.parts[1].removesuffix('.py')}"


def test_every_module_has_a_layer() -> None:
    assert {room_of(path) for path in PACKAGE} - {"picotron.__init__", "workbench.__init__"} == LEVEL.keys()


@pytest.mark.parametrize("path", [path for path in PACKAGE if path.read_text()], ids=str)
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    if not room.endswith("__init__"):
        assert {other for other in rooms(path) - {room} if LEVEL[other] >= LEVEL[room]} == set()


def test_parallel_folders_do_not_import_each_other() -> None:
    for path in PACKAGE:
        if (room := room_of(path)).removeprefix("picotron.") in PARALLEL:
            assert rooms(path) & {f"picotron.{name}" for name in PARALLEL} <= {room}, path


def test_schedules_import_only_the_standard_library() -> None:
    """So schedules can be built, checked, timed and drawn wherever Python runs."""
    allowed = {"picotron.console", "workbench.console", "workbench.files", "workbench.schedules", "workbench.drawing"}
    for path in [*Path("workbench/schedules").glob("*.py"), *Path("workbench/drawing").glob("*.py")]:
        others = {name.split(".")[0] for name in imports(path)} - {"picotron", "workbench"}
        assert others <= sys.stdlib_module_names, path
        assert rooms(path) <= allowed, path


def test_steps_import_torch_alone() -> None:
    """So a machine with torch can run them."""
    for path in Path("steps").glob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= {"steps", "torch", *sys.stdlib_module_names}, path


def test_only_torchrun_and_secrets_come_from_the_environment() -> None:
    allowed = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"}
    allowed |= {"TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "PICOTRON_PRELOAD"}
    for path in [*PACKAGE, Path("train.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                assert ast.literal_eval(node.args[0]) in allowed, path
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                assert ast.literal_eval(node.slice) in allowed, path


def test_assertions_only_look() -> None:
    """Python has none with -O, so a call in one must change nothing, nor wait."""
    harmless = {"any", "differences", "isinstance", "issubclass", "len", "lower", "placement", "count", "numel"}
    for path in (*Path().glob("*.py"), *Path().glob("[!.t]*/**/*.py")):  # not .venv, nor tests
        for statement in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)):
            calls = (node.func for node in ast.walk(statement.test) if isinstance(node, ast.Call))
            assert {ast.unparse(call).rpartition(".")[2] for call in calls} <= harmless, f"{path}:{statement.lineno}"
