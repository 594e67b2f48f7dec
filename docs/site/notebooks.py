"""Notebooks of the steps, each with its diff, its program, its run and one thing to change. Nobody edits them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from docs.site.pages import ROOT, Checkout
from steps.__main__ import NAMES

SECTION = re.compile(r"^## (Step (\d+): .*)\n\n((?:(?!## |<!-- |```).*\n)+)", re.MULTILINE)  # with its prose


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a program, as an exercise.

    Args:
        first: number of the first loss that it changes; 0 if there is none.
        why: the reason, as a sentence.
    """

    old: str
    new: str
    first: int
    why: str


CHANGES = {
    "s1_one_process": Change(
        "optimizer.zero_grad()", "pass", 3,
        "The second step adds its gradients to those of the first one, and only its update is wrong.",
    ),
    "s2_tp": Change(
        "comm.copy, comm.all_reduce)", "comm.copy, comm.copy)", 2,
        "The forward pass is right, but gradients before the copy lack the terms of the other rank.",
    ),
    "s3_sp": Change(
        'if "_proj" not in name:', "if False:", 2,
        "Each rank updates the replicated weights with the gradients of its own tokens only.",
    ),
    "s4_dp": Change(
        "dist.all_reduce(parameter.grad,", 'dist.all_reduce(parameter.grad.div_(size["dp"]),', 2,
        "The gradients are too small by a constant factor, which AdamW cancels, except for its `eps`: compare digits.",
    ),
    "s5_buckets": Change(
        '(name.split(".")[0], axis)', '("", axis)', 0,
        "There are fewer and larger buckets. But none is complete before the end of backward, so no sum overlaps with it.",
    ),
    "s6_zero": Change(
        "bucket.gather()", "pass", 2,
        "A rank has updated its own slice of the weights, and keeps the old values of all other slices.",
    ),
    "s7_pp": Change(
        "running.popleft()", "running.pop()", 0,
        "All stages run their backwards in the opposite order, so each gradient still meets its own micro-batch.",
    ),
    "s8_1f1b": Change(
        "running.popleft()", "running.pop()", 2,
        "Stages hold different numbers of micro-batches, so a gradient meets the activations of another micro-batch.",
    ),
    "s9_cp": Change(
        "torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))", 'torch.cat(chunks).chunk(size["cp"])[cp_rank]', 0,
        "Any assignment of tokens to ranks is right. An implementation that skips the future would be slower.",
    ),
    "s10_ep": Change(
        "EXPERTS, CHOSEN = 8, 2", "EXPERTS, CHOSEN = 8, 1", 1,
        "It is another model, whose all-to-alls send half as many rows. Its router gets no gradient: one weight is always 1.",
    ),
    "s11_muon": Change(
        "for _ in range(5):", "for _ in range(0):", 2,
        "The update is the momentum itself, of which a few directions are much larger than the others.",
    ),
}  # fmt: skip


def headings() -> dict[str, str]:
    """Return the programs by the headings of steps/README.md."""
    return {
        title: NAMES[int(number) - 1] for title, number, _ in SECTION.findall((ROOT / "steps/README.md").read_text())
    }


def notebook(name: str, checkout: Checkout) -> dict[str, Any]:
    """Return the notebook of a step. It needs git, and installs PyTorch and NumPy if they are not there."""
    text = (ROOT / "steps/README.md").read_text()
    title, _, prose = next(found for found in SECTION.findall(text) if NAMES[int(found[1]) - 1] == name)
    program = (ROOT / f"steps/{name}.py").read_text()
    command = program.split("\n")[2]  # of the docstring
    change = CHANGES[name]
    first = f"The loss of step {change.first}." if change.first else "None: all losses stay the same."
    cells = [
        ("markdown", f"# {title}\n\nThis notebook needs no GPU. Run its cells from top to bottom."),
        ("code", (
            "import importlib.util, os\n\n"
            "if not os.path.exists('steps'):\n"
            f"    os.system('git clone --quiet {checkout.repository} picotron')\n"
            "    os.chdir('picotron')\n"
            f"    os.system('git checkout --quiet {checkout.commit}')\n"
            "if not importlib.util.find_spec('torch'):\n"
            "    os.system('pip install --quiet torch numpy')\n"
            "os.environ['OMP_NUM_THREADS'] = '1'  # the ranks share the processor"
        )),
        ("markdown", re.sub(r"\]\(([^):]+\.(?:py|md))", lambda link: f"]({linked(link[1], checkout)}", prose)),
        ("code", f"%%bash\npython -m steps {name}" if name != NAMES[0] else "%%bash\npython -m steps"),
        ("markdown", "The program, to read and to change. This cell writes it to its file:"),
        ("code", f"%%writefile steps/{name}.py\n{program}"),
        ("code", f"%%bash\n{command}"),
        ("markdown", (
            f"## Change one thing\n\nIn the program above, replace `{change.old}` by `{change.new}`. Run its cell and the next "
            "one again. Which loss is the first that differs, and why?\n\n"
            f"<details>\n<summary>Answer</summary>\n\n{first} {change.why}\n\n</details>"
        )),
    ]  # fmt: skip
    return {
        "cells": [cell(kind, body, f"{name}-{number}") for number, (kind, body) in enumerate(cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def linked(link: str, checkout: Checkout) -> str:
    """Return the address of a file that steps/README.md links to."""
    return checkout.link((ROOT / "steps" / link).resolve().relative_to(ROOT).as_posix())


def cell(kind: str, text: str, identity: str) -> dict[str, Any]:
    own: dict[str, Any] = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "id": identity, "metadata": {}, "source": text.rstrip("\n"), **own}


def write(folder: Path, checkout: Checkout) -> None:
    folder.mkdir()
    for name in NAMES:
        text = json.dumps(notebook(name, checkout), indent=1, ensure_ascii=False)
        (folder / f"{name}.ipynb").write_text(text + "\n")
