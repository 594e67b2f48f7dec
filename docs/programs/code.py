"""Tables of docs/code.md: every file with the first sentence of its docstring, in reading order.

python -m docs.programs.code            write the tables into docs/code.md
python -m docs.programs.code step       list the files that run in one training step
"""

import ast
import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

PAGE = Path("docs/code.md")
# Headings, and under each of them files and folders in reading order.
ORDER = """
# The trainer
train.py
picotron/config.py
picotron/process_group_manager.py
picotron/model: llama families attention model_config weights split_backward recompute float8 flops hub
picotron/tensor_parallel: tp_communications tensor_parallel cross_entropy
picotron/pipeline_parallel: pipeline_parallel modules pp_communications stages plan auto executor recorder
picotron/context_parallel: context_parallel cp_communications positions block_attention
picotron/data_parallel: data_parallel zero1 zero3 owned_slices
picotron/parallelize.py
picotron/train_step.py
picotron/optimizer.py
picotron/batches.py
picotron/sequences.py
picotron/check_batches.py
picotron/trainer.py
picotron/data: documents text samples spans tokens cache rows loader
picotron/checkpoint: checkpoint writer stage_files safetensors_folder host_buffers
picotron/run: launch run_folder metrics progress
# What is built on it
picotron/schedules: actions schedules order checker simulate improve search generation schedule_csv trace
picotron/drawing: __main__ score draw draw_text draw_svg
generate.py
picotron/generation: rotation kv_cache sampling prompts
picotron/explain: explain estimate forecast errors hardware measure fake_group
create_config.py
submit_slurm_jobs.py
extract_metrics.py
picotron/sweep: combinations planner planned_jobs jobs local_jobs slurm
# Tools for all of them
picotron/command_line.py
picotron/config_checks.py
picotron/console.py
picotron/files.py
picotron/collectives.py
# A check of any trainer
conformance: __main__ case chapters models result reference ranks check compare rounding export oracle grid training worker_pool
conformance/fuzz: __main__ cases check files losses modules reference sequences work toy_pipelines tokenizer_kinds chat_templates
conformance/examples/ddp.py
conformance/examples/zero1.py
conformance/examples/pipeline.py
conformance/examples/ring.py
conformance/adapters/loop.py
conformance/adapters/stage.py
conformance/adapters/picotron.py
conformance/adapters/torch_ddp.py
conformance/adapters/torch_fsdp.py
conformance/adapters/torch_tp.py
conformance/adapters/torch_pp.py
conformance/adapters/torch_cp.py
conformance/adapters/hf_accelerate.py
conformance/adapters/hf_tp.py
conformance/adapters/hf_picotron.py
conformance/adapters/torchtitan.py
"""


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, without papers, for a table."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    first = re.split(r"(?<=\.) (?=[A-Z(])|:  +|:$", paragraph)[0].removesuffix(".")
    return re.sub(r" \([^()]*arXiv[^()]*\)", "", first)


def row(path: Path, name: str) -> str:
    return f"| [{name}](../{path}) | {sentence(path)} |"


def tables() -> str:
    """Return the tables in Markdown: a heading for each part, a row for each file."""
    lines: list[str] = []
    for line in ORDER.strip().splitlines():
        place, _, names = line.partition(": ")
        if place.startswith("#"):
            lines += ["", f"#{place}", "", "| file | content |", "|---|---|"]
        elif not names:
            lines.append(row(Path(place), place.removeprefix("picotron/")))
        else:
            folder = Path(place)
            lines.append(f"| **[{folder.name}/](../{folder})** | **{sentence(folder / '__init__.py')}** |")
            lines += [row(folder / f"{name}.py", f"{folder.name}/{name}.py") for name in names.split()]
    return "\n".join(lines).lstrip("\n") + "\n"


def replace_tables(page: str) -> str:
    """Replace the part of the page between its two comments."""
    begin, end = "<!-- tables -->\n", "\n<!-- end of tables -->"
    before, after = page.split(begin)[0], page.split(end)[1]
    return f"{before}{begin}\n{tables()}{end}{after}"


def print_files_of_a_step() -> None:
    """Train for three steps on one process, and print which files the second step runs and which ones are imported."""
    import train

    used: set[str] = set()
    make_train_step: Callable[..., Callable[..., Any]] = train.make_train_step

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(Path.cwd() / "picotron")):
            used.add(str(Path(path).relative_to(Path.cwd() / "picotron")))

    def noting(*arguments: Any) -> Callable[..., Any]:
        step, number = make_train_step(*arguments), 0

        def run(*inputs: Any) -> Any:
            nonlocal number
            number += 1
            sys.setprofile(note if number == 2 else None)  # until the third step begins
            return step(*inputs)

        return run

    sys.argv = ["train.py", "--config", "docs/small.json", "--training.total_train_steps", "3", "--checkpoint.save_dir"]
    sys.argv.append("runs/files_of_a_step")
    with (
        mock.patch.object(train, "make_train_step", noting),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        train.main()
    there = [path for path in Path("picotron").rglob("*.py") if path.name != "__init__.py"]
    imported = [name for name, module in sys.modules.items() if name.startswith("picotron.") and module.__file__]
    files = [name for name in imported if not (sys.modules[name].__file__ or "").endswith("__init__.py")]
    print(f"picotron/ has {len(there)} files. train.py imports {len(files)} of them, and a step runs {len(used)}:")
    print("  " + "\n  ".join(sorted(used)))


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        print_files_of_a_step()
    else:
        PAGE.write_text(replace_tables(PAGE.read_text()))
