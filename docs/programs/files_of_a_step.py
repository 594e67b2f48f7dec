"""Files of picotron/ that train.py imports, and those that run in one training step:

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
from picotron.pipeline_parallel.stages import PipelinePlan


def main() -> None:
    """Train for three steps on one process, and watch the calls of the second one."""
    folder, used, steps = Path("picotron").resolve(), set[Path](), iter(range(3))
    make_steps: Any = PipelinePlan.make_steps

    def note(frame: FrameType, event: str, argument: object) -> None:
        used.add(Path(frame.f_code.co_filename))

    def watched(*arguments: Any) -> Any:
        step, evaluate = make_steps(*arguments)

        def run(*inputs: Any) -> Any:
            sys.setprofile(note if next(steps) == 1 else None)  # until the third step begins
            return step(*inputs)

        return run, evaluate

    sys.argv = ["train.py", "--config", "docs/small.json", "--training.total_train_steps", "3"]
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with mock.patch.object(PipelinePlan, "make_steps", watched), quiet[0], quiet[1]:
        train.main()
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    imported = {Path(getattr(module, "__file__", None) or "") for module in sys.modules.values()}
    print(f"picotron/ has {len(files)} files. train.py imports {len(imported & set(files))}, and a step runs these:")
    print(*sorted(str(path.relative_to(folder)) for path in used & set(files)), sep="\n")


if __name__ == "__main__":
    main()
