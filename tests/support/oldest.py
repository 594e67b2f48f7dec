"""Print the oldest versions that pyproject.toml allows, as arguments of pip."""

import tomllib
from pathlib import Path


def oldest() -> list[str]:
    """Return a requirement for each package that picotron and its tests import. (ruff and mypy only read the code.)"""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["dev"]
    return [each.replace(">=", "==") for each in needed if not each.startswith(("ruff", "mypy"))]


if __name__ == "__main__":
    print(*oldest())
