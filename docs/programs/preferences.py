"""Write preferences from Python's standard library: to a function's docstring, the chosen answer is its body, and the
rejected one has the lines of the body in reverse order.

python -m docs.programs.preferences preferences.jsonl
"""

import json
import sys
from pathlib import Path

from docs.programs.python_pairs import all_pairs
from workbench.files import write_atomically


def main(path: str) -> None:
    pairs = all_pairs()
    lines = []
    for pair in pairs:
        body = pair["completion"].splitlines(keepends=True)
        if len(body) > 1:
            record = {"prompt": pair["prompt"], "chosen": "".join(body), "rejected": "".join(body[::-1])}
            lines.append(json.dumps(record) + "\n")
    write_atomically(Path(path), "".join(lines))
    print(f"{len(lines):,} pairs in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
