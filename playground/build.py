"""Build of the playground, a static page that any web server can host:

    python -m playground.build                            Pyodide from its CDN
    python -m playground.build --pyodide FOLDER           Pyodide from a copy, such as that of the npm package pyodide
    python -m http.server --directory site                serve it on this machine, on port 8000

Pyodide (pyodide.org) is CPython for the browser.
"""

import argparse
import shutil
import sys
import zipfile
from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path

from picotron.console import UserError

ROOT = Path(__file__).resolve().parent.parent
VERSION = "314.0.7"  # the Python in it is 3.14
CDN = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def python_files() -> list[Path]:
    """Return the Python that the page runs, as paths relative to the repository: what the bridge imports."""
    finder = ModuleFinder(path=[str(ROOT)])  # without the standard library
    finder.import_hook("playground.bridge")
    files = [vars(module)["__file__"] for module in finder.modules.values()]  # None for those built into Python
    return sorted(Path(file).relative_to(ROOT) for file in files if file)


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
    page = out / "index.html"
    page.write_text(page.read_text().replace("{{pyodide}}", "pyodide/" if pyodide else CDN))
    with zipfile.ZipFile(out / "python.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in python_files():
            archive.write(ROOT / path, path)
    if pyodide:
        (out / "pyodide").mkdir()
        for name in PYODIDE_FILES:
            shutil.copy(pyodide / name, out / "pyodide" / name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m playground.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pyodide", type=Path, help=f"folder with a copy of Pyodide; by default {CDN}")
    parser.add_argument("--out", type=Path, default=Path("site"), help="folder to write; by default site")
    options = parser.parse_args(arguments)
    try:
        build(options.out, options.pyodide)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"{options.out}/index.html; to see it: python -m http.server --directory {options.out}")


if __name__ == "__main__":
    main()
