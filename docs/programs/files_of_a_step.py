"""Files and lines that train.py imports on token files, and the files of picotron/ that run in one training step:

python -m docs.programs.files_of_a_step
"""

import contextlib
import io
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import train

IMPORTED = [Path(str(module.__file__)) for module in sys.modules.values() if getattr(module, "__file__", None)]


def main() -> None:
    """Train for three steps on one process, and watch the calls of the second one."""
    root, used, steps = Path.cwd(), set[Path](), iter(range(3))
    make_pipeline: Any = train.make_pipeline

    def note(frame: FrameType, event: str, argument: object) -> None:
        used.add(Path(frame.f_code.co_filename))

    def watched(*arguments: Any) -> Any:
        pipeline, step, evaluate = make_pipeline(*arguments)

        def run(*inputs: Any) -> Any:
            sys.setprofile(note if next(steps) == 1 else None)  # until the third step begins
            return step(*inputs)

        return pipeline, run, evaluate

    files = {
        floor: [path for path in (root / floor).rglob("*.py") if path.name != "__init__.py"]
        for floor in ("picotron", "workbench")
    }
    for floor, paths in files.items():
        imported = set(paths) & set(IMPORTED)
        lines = [sum(len(path.read_text().splitlines()) for path in each) for each in (paths, imported)]
        print(
            f"{floor}/: {len(paths)} files with {lines[0]:,} lines; train.py imports {len(imported)} with {lines[1]:,}"
        )
    sys.argv = ["train.py", "--config", "docs/small.json", "--training.total_train_steps", "3"]
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with mock.patch.object(train, "make_pipeline", watched), quiet[0], quiet[1]:
        train.main()
    print("a step runs:")
    print(*sorted(str(path.relative_to(root / "picotron")) for path in used & set(files["picotron"])), sep="\n")


if __name__ == "__main__":
    main()
