"""Solutions to the exercises of docs/checkpoints.md, which tests/docs/test_exercises.py checks. To print the sizes of a
checkpoint:

    python -m docs.solutions.checkpoints runs/trial/step_00000003
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the dtype, shape and offsets of each tensor in a safetensors file, and the byte at which the data begins."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    del header["__metadata__"]
    return header, 8 + size


def read_row(file: Path, name: str, row: int) -> bytes:
    """Read one row of a matrix, and no other byte of the file's data."""
    header, begin = read_header(file)
    (start, end), rows = header[name]["data_offsets"], header[name]["shape"][0]
    size = (end - start) // rows
    with file.open("rb") as opened:
        opened.seek(begin + start + row * size)
        return opened.read(size)


def sizes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Return the number of elements and the bytes of each kind of tensors (model, exp_avg, ...) in a checkpoint."""
    totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file in sorted(checkpoint.glob("*.safetensors")):
        kind = file.name.removesuffix(".safetensors").partition("-")[0]
        for tensor in read_header(file)[0].values():
            start, end = tensor["data_offsets"]
            elements, size = totals[kind]
            totals[kind] = elements + math.prod(tensor["shape"]), size + end - start
    return dict(totals)


if __name__ == "__main__":
    by_kind = sizes(Path(sys.argv[1]))
    parameters = by_kind["model"][0]
    for kind, (_, size) in by_kind.items():
        print(f"{kind:12}{size:12,} bytes, {size / parameters:g} for each of {parameters:,} parameters")
