"""The page of the playground: its build, the files that it needs, and the command that it shows. No browser here."""

import json
import re
import shlex
import subprocess
import sys
import zipfile
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from playground.build import CDN, PYODIDE_FILES, ROOT, python_files
from playground.build import build as build_page
from tests.playground.test_playground import ask
from workbench.pipelines.planning import plan_pipeline
from workbench.run.config_reader import load_config
from workbench.run.model_config import load_model_config


@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "interleaved_1f1b", "layout": "Et*2|t|(t|)*5tL"},
        {"schedule": "auto", "memory": 4},
    ],
)
def test_command_trains_with_the_schedule(asked: dict[str, Any], tmp_path: Path) -> None:
    asked = {"pp": 4, "micro_batches": 8, **asked}
    result = ask("train", **asked)
    words = shlex.split(result["command"].replace("\\\n", " "))
    assert words[:2] == ["python", "train.py"]
    (tmp_path / "schedule.csv").write_text(result["file"])
    config = load_config([word.replace("csv:", f"csv:{tmp_path}/") for word in words[2:]])
    plan = plan_pipeline(config, load_model_config(config.model))
    actions = [[str(action) for action in program] for program in plan.schedule.programs]
    assert actions == ask("timeline", **asked)["actions"]
    if "layout" in asked:
        assert [len(stage.layers) for stage in plan.stages] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_page_has_the_results_of_its_links_and_all_that_it_loads(tmp_path: Path) -> None:
    """It draws the results before Python runs, and works without a network once its worker has kept all files."""
    build_page(tmp_path)
    html = (tmp_path / "index.html").read_text()
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', html)
    assert text
    assert "<" not in text[1]  # which could end the element
    results = json.loads(text[1])["results"]
    assert len(results) > 3  # those of the first view
    for each in results:
        assert each["result"] == ask(each["call"], **each["request"])
        assert "error" not in each["result"]
    loaded = re.findall(r'(?:src|href)="([^"#][^":]*)"', unescape(html.split("<body")[0]))
    for script in tmp_path.glob("*.js"):
        loaded += re.findall(r'(?:from "\./|register\("|new URL\(")([^"]+)"(?!, pyodide)', script.read_text())
    assert {"main.js", "worker.js", "offline.js"} <= set(loaded)
    files = re.search(r"FILES = (\[.*?\]);", (tmp_path / "offline.js").read_text())
    assert files
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert set(json.loads(files[1])) == written - {"index.html", "offline.js"} | {
        "./",
        *(CDN + n for n in PYODIDE_FILES),
    }
    assert {name for name in loaded if not name.startswith("http")} <= written


@pytest.mark.processes
def test_python_of_the_page_runs_with_nothing_else(tmp_path: Path) -> None:
    """Only the archive and the standard library, as in Pyodide. The archive has what the page imports, and no more."""
    build_page(tmp_path)
    archive = str(tmp_path / "python.zip")
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]\nfrom playground.bridge import call\nprint(call('timeline', '{}'))\n"
        "print(*(getattr(m, '__file__', None) for m in sys.modules.values()), sep='\\n')"
    )
    command = [sys.executable, "-I", "-S", "-c", program, archive]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    result, *files = done.stdout.splitlines()
    assert json.loads(result)["step_time"] == 33
    imported = sorted(file.removeprefix(f"{archive}/") for file in files if file.startswith(archive))
    entries = [f"docs/schedules/{path.name}" for path in sorted((ROOT / "docs/schedules").glob("*"))]
    assert zipfile.ZipFile(archive).namelist() == [*map(str, python_files()), *entries] == [*imported, *entries]
