"""The page of the playground: its build, its defaults, and the command that it shows. No browser here."""

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

from picotron.command_line import load_config
from picotron.console import UserError
from picotron.model.model_config import load_model_config
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import SCHEDULES, build
from playground.bridge import call
from playground.build import CDN, PYODIDE_FILES, ROOT, python_files
from playground.build import build as build_page
from playground.requests import Request


def ask(function: str, **request: Any) -> Any:
    return json.loads(call(function, json.dumps(request)))


# --------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("name", [*SCHEDULES, "auto"])
@pytest.mark.parametrize("chunks", [0, 3])
def test_train_this_is_a_command_that_trains_with_the_schedule(
    name: str, chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"schedule": name, "pp": 4, "microbatches": 8, "chunks": chunks, "group_size": 6, "memory": 4}
    result = ask("train", **request)
    words = result["command"].replace("\\\n", " ").split()
    assert words[:6] == ["torchrun", "--nproc_per_node", "4", "train.py", "--config", "template/base_config.json"]
    if result["file"]:
        (tmp_path / "schedule.csv").write_text(result["file"])
        words = [word.replace("csv:", f"csv:{tmp_path}/") for word in words]
    config = load_config(words[4:])
    assert config.distributed.world_size == 4
    plan = plan_pipeline(config, load_model_config(config.model))
    actions = [[str(action) for action in program] for program in plan.schedule.programs]
    assert actions == ask("timeline", **request)["actions"]
    assert config.logging.trace_steps == [5]


def test_train_this_has_the_layout() -> None:
    layout = "Et*2|t|(t|)*5tL"
    command = ask("train", schedule="interleaved_1f1b", pp=4, microbatches=8, layout=layout)["command"]
    config = load_config(shlex.split(command.replace("\\\n", " "))[4:])
    stages = plan_pipeline(config, load_model_config(config.model)).stages
    assert [len(stage.layers) for stage in stages] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_train_this_writes_the_readers_own_schedule_to_a_file() -> None:
    text = as_csv(build("zb_h1", 2, 3).programs)
    assert ask("train", schedule="csv", text=text)["file"] == text
    assert ask("train", schedule="zb_h1")["file"] == ""


# ------------------------------------------------------------------------------------------------------------ the page


def test_state_of_the_page_has_the_defaults_of_requests() -> None:
    source = (ROOT / "playground/page/state.js").read_text()
    defaults = re.search(r"export const DEFAULTS = \{(.*?)\n\};", source, re.DOTALL)
    assert defaults
    pairs = dict(re.findall(r"^  (\w+): (.*),$", defaults[1], re.MULTILINE))
    for field, default in vars(Request()).items():
        if field not in ("schedule", "text"):
            assert json.loads(pairs[field]) == default, field


def test_legend_colours_and_names_come_from_the_pictures() -> None:
    start = ask("start")
    assert start["schedules"] == list(SCHEDULES)
    assert start["meaning"]["I"] == "backward for the input"


def test_built_page_is_complete(tmp_path: Path) -> None:
    """All that the page loads is in its folder, or in Pyodide's."""
    site = tmp_path / "site"
    build_page(site)
    html = (site / "index.html").read_text()
    assert f'<meta name="pyodide" content="{CDN}">' in html
    links = re.findall(r'(?:src|href)="([^"#][^":]*)"', unescape(html))
    scripts = list(site.glob("*.js"))
    links += [name for path in scripts for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    links += [name for path in scripts for name in re.findall(r'new URL\("([^"]+)", (?:base|import)', path.read_text())]
    assert {"main.js", "style.css", "worker.js", "python.zip", "state.js"} <= set(links)
    assert all((site / link).is_file() for link in links)


@pytest.mark.processes
def test_python_of_the_page_runs_with_nothing_else(tmp_path: Path) -> None:
    """Only the archive and the standard library, as in Pyodide."""
    build_page(tmp_path / "site")
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]\nfrom playground.bridge import call\nprint(call('timeline', '{}'))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "site" / "python.zip")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["step_time"] == 33


@pytest.mark.processes
def test_archive_has_what_the_page_imports_and_nothing_else(tmp_path: Path) -> None:
    build_page(tmp_path)
    names = zipfile.ZipFile(tmp_path / "python.zip").namelist()
    assert names == [str(path) for path in python_files()]
    program = (
        "import sys, playground.bridge\nprint(*(getattr(m, '__file__', '') for m in sys.modules.values()), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = [Path(line) for line in done.stdout.splitlines()]
    rooms = [ROOT / "picotron", ROOT / "playground"]
    assert names == sorted(str(path.relative_to(ROOT)) for path in loaded if set(rooms) & set(path.parents))
    assert {"picotron/schedules/simulate.py", "picotron/pipeline_parallel/stages.py"} <= set(names)


def test_build_copies_pyodide_and_names_what_is_missing(tmp_path: Path) -> None:
    pyodide = tmp_path / "pyodide"
    pyodide.mkdir()
    with pytest.raises(UserError, match=r"lacks pyodide\.mjs; `npm install pyodide@"):
        build_page(tmp_path / "site", pyodide)
    for name in PYODIDE_FILES:
        (pyodide / name).write_text(name)
    build_page(tmp_path / "site", pyodide)
    assert '<meta name="pyodide" content="pyodide/">' in (tmp_path / "site" / "index.html").read_text()
    assert (tmp_path / "site" / "pyodide" / "pyodide.asm.wasm").read_text() == "pyodide.asm.wasm"
    build_page(tmp_path / "site")  # replaces the page
    assert not (tmp_path / "site" / "pyodide").exists()
    with pytest.raises(UserError, match="is not empty and holds no playground"):
        build_page(pyodide)
    assert (pyodide / "pyodide.mjs").exists()


def test_versions_of_pyodide_agree() -> None:
    versions = json.loads((ROOT / "playground/package.json").read_text())["devDependencies"]
    assert f"/v{versions['pyodide']}/" in CDN


def test_no_file_of_the_page_has_more_than_300_lines() -> None:
    pages = [path for path in (ROOT / "playground").rglob("*.*") if path.suffix in (".js", ".mjs", ".css", ".html")]
    pages = [path for path in pages if "node_modules" not in path.parts]
    assert {path.name for path in pages if len(path.read_text().splitlines()) > 300} == set()
    assert len(pages) > 15
