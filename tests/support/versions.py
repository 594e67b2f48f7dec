"""Print the oldest or the newest versions that pyproject.toml allows, as arguments of pip."""

import sys
import tomllib
from pathlib import Path


def requirements(versions: str) -> list[str]:
    """Return a requirement for each package that picotron and its tests import. (ruff and mypy only read the code.)"""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["dev"]
    equal = "==" if versions == "oldest" else ">="
    return [each.replace(">=", equal) for each in needed if not each.startswith(("ruff", "mypy"))]


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
