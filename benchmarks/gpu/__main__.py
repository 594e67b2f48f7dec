"""python -m benchmarks.gpu, see program.py. (Other processes can import that module, but not this one.)"""

import importlib.util
import sys

NEEDED = ("torch", "transformers", "numpy", "pydantic", "xxhash")  # with the packages that these need

if __name__ == "__main__":
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"{sys.executable} has no {', '.join(missing)}, which make gpu needs; create .venv with `make setup`, or see "
            f"docs/reference/gpu.md for a machine without a network"
        )
    from benchmarks.gpu.program import main

    sys.exit(main(sys.argv[1:]))
