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
from urllib.parse import parse_qsl

import pytest

from picotron.command_line import load_config
from picotron.console import UserError
from picotron.model.model_config import load_model_config
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import SCHEDULES, build
from playground.bridge import call
from playground.build import CDN, PANELS, PYODIDE_FILES, ROOT, python_files
from playground.build import build as build_page
from playground.memory import MODEL, MemoryRequest
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


def data_of(site: Path) -> dict[str, Any]:
    """Return the data in a built page."""
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', (site / "index.html").read_text())
    assert text
    return dict(json.loads(text[1]))


def test_page_has_the_results_of_its_first_view_and_of_its_links(tmp_path: Path) -> None:
    """It draws them before Python runs."""
    build_page(tmp_path)
    results = data_of(tmp_path)["results"]
    for each in results:
        assert each["result"] == ask(each["call"], **each["request"])
        assert "error" not in each["result"]
    asked = [(each["call"], each["request"]) for each in results]
    first = {name: vars(Request(schedule=name)) for name in PANELS.values()}
    assert asked[:3] == [*(("timeline", request) for request in first.values()), ("memory", vars(MemoryRequest()))]
    html = (ROOT / "playground/page/index.html").read_text()
    links = [dict(parse_qsl(unescape(link))) for link in re.findall(r'href="#(.*?=.*?)"', html)]
    assert len(links) == 7  # three questions in each tab, and a link in the text of one
    for link in links:
        call_of = "memory" if link.pop("tab", "") == "memory" else "timeline"
        changed = {key: text for key, text in link.items() if key not in ("a", "b", "critical")}
        assert any(name == call_of and has(request, changed) for name, request in asked), link


def has(request: dict[str, Any], texts: dict[str, str]) -> bool:
    """Return whether a request has the values that a link writes as texts."""
    written = {key: str(request[key]).lower() if isinstance(request[key], bool) else request[key] for key in texts}
    return all(written[key] == type(written[key])(text) for key, text in texts.items())


def test_data_of_the_page_cannot_end_its_element(tmp_path: Path) -> None:
    build_page(tmp_path)
    text = (tmp_path / "index.html").read_text()
    data = text.split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data


def test_models_of_the_page_are_those_of_the_pages(tmp_path: Path) -> None:
    build_page(tmp_path)
    models = data_of(tmp_path)["models"]
    assert {"llama-3.1-8b", "llama-3.1-70b"} <= set(models)
    defaults = vars(MemoryRequest())
    assert models["llama-3.1-8b"] == {key: defaults[key] for key in MODEL}


def test_service_worker_keeps_all_files_and_its_version_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def versions(site: Path) -> tuple[str, list[str]]:
        build_page(site)
        text = (site / "offline.js").read_text()
        version, files = re.search(r'CACHE = "playground (\w+)"', text), re.search(r"FILES = (\[.*?\]);", text)
        assert version
        assert files
        return version[1], json.loads(files[1])

    first, files = versions(tmp_path / "one")
    written = {
        path.relative_to(tmp_path / "one").as_posix() for path in (tmp_path / "one").rglob("*") if path.is_file()
    }
    assert set(files) == written - {"index.html", "offline.js"} | {"./"} | {CDN + name for name in PYODIDE_FILES}
    assert versions(tmp_path / "two")[0] == first
    monkeypatch.setattr("playground.build.PANELS", {"a": "zbv", "b": "1f1b"})
    assert versions(tmp_path / "three")[0] != first


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
    links = re.findall(r'(?:src|href)="([^"#][^":]*)"', unescape(html.split("<body")[0]))
    scripts = list(site.glob("*.js"))
    links += [name for path in scripts for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    links += re.findall(r'register\("([^"]+)"', (site / "install.js").read_text())
    links += [name for path in scripts for name in re.findall(r'new URL\("([^"]+)", (?:base|import)', path.read_text())]
    assert {"main.js", "style.css", "worker.js", "python.zip", "state.js", "offline.js"} <= set(links)
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
    entries = [f"docs/schedules/{path.name}" for path in sorted((ROOT / "docs/schedules").iterdir())]
    assert names == [*map(str, python_files()), *entries]
    program = (
        "import sys, playground.bridge\nprint(*(getattr(m, '__file__', '') for m in sys.modules.values()), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = [Path(line) for line in done.stdout.splitlines()]
    rooms = [ROOT / "picotron", ROOT / "playground", ROOT / "docs"]
    assert names[: -len(entries)] == sorted(
        str(path.relative_to(ROOT)) for path in loaded if set(rooms) & set(path.parents)
    )
    assert {"picotron/schedules/simulate.py", "picotron/explain/estimate.py", "picotron/drawing/score.py"} <= set(names)


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
