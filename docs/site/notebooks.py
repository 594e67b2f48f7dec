"""Notebooks of the steps, each with its diff, its program, its run and one thing to change. Nobody edits them."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from docs.site.pages import ROOT, Checkout
from steps.__main__ import NAMES

SECTION = re.compile(r"^## (Step (\d+): .*)\n\n((?:(?!## |<!-- |```).*\n)+)", re.MULTILINE)  # with its prose
CHANGES: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "docs/site/changes.toml").read_text())
COLAB = "https://colab.research.google.com/github"


def sections() -> dict[str, tuple[str, str]]:
    """Return the heading and the prose of each program in steps/README.md."""
    found = SECTION.findall((ROOT / "steps/README.md").read_text())
    return {NAMES[int(number) - 1]: (title, prose) for title, number, prose in found}


def buttons(checkout: Checkout) -> dict[str, str]:
    """Return links to the notebooks, by headings of steps/README.md. `{root}` stands for the folder of the site."""
    found = {}
    for name, (heading, _) in sections().items():
        links = f'<a class="play" href="{{root}}/notebooks/{name}.ipynb" download>Download the notebook</a>'
        if checkout.on_web:
            place = f"{COLAB}{checkout.repository.removeprefix('https://github.com')}/blob/notebooks/{name}.ipynb"
            links = f'<a class="play" href="{place}">Run it in Colab</a> {links}'
        found[heading] = f'<span class="buttons">{links}</span>'
    return found


def clone(checkout: Checkout) -> str:
    """Return the first cell: it clones the repository, and installs PyTorch and NumPy if they are not there."""
    return (
        "import importlib.util, os\n\n"
        "if not os.path.exists('steps'):\n"
        f"    os.system('git clone --quiet {checkout.repository} picotron')\n"
        "    os.chdir('picotron')\n"
        f"    os.system('git checkout --quiet {checkout.commit}')\n"
        "if not importlib.util.find_spec('torch'):\n"
        "    os.system('pip install --quiet torch numpy')\n"
        "os.environ['OMP_NUM_THREADS'] = '1'  # the ranks share the processor"
    )


def notebook(name: str, checkout: Checkout) -> dict[str, Any]:
    """Return the notebook of a step. It needs git, and installs PyTorch and NumPy if they are not there."""
    title, prose = sections()[name]
    program = (ROOT / f"steps/{name}.py").read_text()
    command = program.split("\n")[2]  # of the docstring
    change = CHANGES[name]

    def linked(link: re.Match[str]) -> str:
        return f"]({checkout.link(os.path.relpath(ROOT / 'steps' / link[1], ROOT))}"

    first = f"The loss of step {change['first']}." if change["first"] else "None: all losses stay the same."
    cells = [
        ("markdown", f"# {title}\n\nThis notebook needs no GPU. Run its cells from top to bottom."),
        ("code", clone(checkout)),
        ("markdown", re.sub(r"\]\(([^):]+\.(?:py|md))", linked, prose)),
        ("code", f"%%bash\npython -m steps {name}" if name != NAMES[0] else "%%bash\npython -m steps"),
        ("markdown", "The program, to read and to change. This cell writes it to its file:"),
        ("code", f"%%writefile steps/{name}.py\n{program}"),
        ("code", f"%%bash\n{command}"),
        ("markdown", (
            f"## Change one thing\n\nIn the program above, replace `{change['old']}` by `{change['new']}`. Run its cell and the next "
            "one again. Which loss is the first that differs, and why?\n\n"
            f"<details>\n<summary>Answer</summary>\n\n{first} {change['why']}\n\n</details>"
        )),
    ]  # fmt: skip
    empty: dict[str, dict[str, Any]] = {"markdown": {}, "code": {"outputs": [], "execution_count": None}}
    return {
        "cells": [
            {"cell_type": kind, "id": f"{name}-{i}", "metadata": {}, "source": text.rstrip("\n"), **empty[kind]}
            for i, (kind, text) in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write(folder: Path, checkout: Checkout) -> None:
    folder.mkdir()
    for name in NAMES:
        text = json.dumps(notebook(name, checkout), indent=1, ensure_ascii=False)
        (folder / f"{name}.ipynb").write_text(text + "\n")
