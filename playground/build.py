"""Build of the playground, a part of the website, see docs/site/build.py: static files for any web server.

Pyodide (pyodide.org) is CPython for the browser.
"""

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from picotron.console import UserError
from playground.bridge import call, start
from playground.memory import MODEL, MemoryRequest
from playground.requests import Request

ROOT = Path(__file__).resolve().parent.parent
VERSION = "314.0.7"  # the Python in it is 3.14
CDN = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
ENTRIES = sorted((ROOT / "docs" / "schedules").glob("*"))  # of the scoreboard
MODELS = sorted(ROOT.glob("docs/llama-*/config.json"))
PANELS = {"a": "1f1b", "b": "zbv"}  # the schedules that a reader sees first
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def python_files() -> list[Path]:
    """Return the Python that the page runs, as paths relative to the repository: what the bridge imports."""
    # Without the standard library, nor what the memory tab does not reach: the config's type, and pp_engine "auto".
    unused = ["picotron.config", "workbench.pipelines.auto"]
    finder = ModuleFinder(path=[str(ROOT)], excludes=unused)
    finder.import_hook("playground.bridge")
    files = [vars(module)["__file__"] for module in finder.modules.values()]  # None for those built into Python
    return sorted(Path(file).relative_to(ROOT) for file in files if file)


def page_data(html: str) -> dict[str, Any]:
    """Return what the page needs before Python runs in it: the defaults of the controls, sizes of models, and the
    results for the first view and for each link in the page that sets controls.
    """
    timeline = {name: value for name, value in vars(Request()).items() if name not in ("schedule", "text")}
    defaults = {"timeline": timeline, "memory": vars(MemoryRequest())}
    models = {path.parent.name: json.loads(path.read_text()) for path in MODELS}
    return {
        **start(""),
        "panels": PANELS,
        "defaults": defaults,
        "models": {
            name: {key: config.get(key, defaults["memory"][key]) for key in MODEL} for name, config in models.items()
        },
        "results": [
            result
            for link in ("", "tab=memory", *re.findall(r'href="#([^"]+=[^"]*)"', html))
            for result in results(link.replace("&amp;", "&"))
        ],
    }


def results(link: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of the bridge for a link such as pp=8&last=0.5, with their results."""
    state = dict(parse_qsl(link, keep_blank_values=True))
    if state.get("tab") == "memory":
        requests: list[tuple[str, Any]] = [("memory", MemoryRequest(**values_of(MemoryRequest(), state)))]
    else:
        shown = [state.get(panel, name) for panel, name in PANELS.items()]
        values = values_of(Request(), state)
        requests = [("timeline", Request(**values, schedule=name, text=state.get(name, ""))) for name in shown if name]
    for function, request in requests:
        yield {
            "call": function,
            "request": vars(request),
            "result": json.loads(call(function, json.dumps(vars(request)))),
        }


def values_of(defaults: Any, state: dict[str, str]) -> dict[str, Any]:
    """Return those values of a link that a request has, as numbers where its defaults are numbers."""
    types = {name: type(default) for name, default in vars(defaults).items()}
    return {
        name: text == "true" if types[name] is bool else types[name](text)
        for name, text in state.items()
        if name in types
    }


def build(out: Path, pyodide: Path | None = None) -> None:
    """Write the page to a folder.

    Args:
        out: the folder; an earlier page in it is replaced.
        pyodide: folder with a copy of Pyodide, to be part of the page; by default, the browser loads it from CDN.

    Raises:
        UserError: `pyodide` lacks a file, or `out` holds something else.
    """
    missing = [name for name in PYODIDE_FILES if pyodide and not (pyodide / name).is_file()]
    if missing:
        raise UserError(f"--pyodide {pyodide} lacks {missing[0]}; `npm install pyodide@{VERSION}` installs a copy")
    if out.exists() and any(out.iterdir()) and not (out / "python.zip").is_file():
        raise UserError(f"--out {out} is not empty and holds no playground; choose another folder")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "playground" / "page", out)
    with zipfile.ZipFile(out / "python.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (*python_files(), *(path.relative_to(ROOT) for path in ENTRIES)):
            archive.writestr(zipfile.ZipInfo(str(path)), (ROOT / path).read_bytes(), zipfile.ZIP_DEFLATED)  # no dates
    if pyodide:
        (out / "pyodide").mkdir()
        for name in PYODIDE_FILES:
            shutil.copy(pyodide / name, out / "pyodide" / name)
    page = out / "index.html"
    html = page.read_text()
    data = json.dumps(page_data(html)).replace("<", "\\u003c")  # no text can end the element
    page.write_text(html.replace("{{pyodide}}", "pyodide/" if pyodide else CDN).replace("{{data}}", data))
    kept = (path for path in out.rglob("*") if path.is_file() and path.name != "index.html")  # which is ./
    write_worker(out / "offline.js", kept, [] if pyodide else [CDN + name for name in PYODIDE_FILES])


def write_worker(worker: Path, kept: Iterable[Path], elsewhere: Sequence[str] = ()) -> None:
    """Write into a service worker which files it keeps, and a version that changes with any of them.

    Args:
        kept: files in its folder.
        elsewhere: addresses of other files.
    """
    out, digest = worker.parent, hashlib.sha256("".join(elsewhere).encode())
    names = {path.relative_to(out).as_posix(): path for path in sorted(kept) if path != worker}
    for name, path in names.items():
        digest.update(f"{name}\0".encode() + path.read_bytes())
    text = worker.read_text().replace("{{version}}", digest.hexdigest()[:16])
    worker.write_text(text.replace('["{{files}}"]', json.dumps(["./", *names, *elsewhere])))
