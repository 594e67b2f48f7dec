"""Solutions of the exercises of docs/checkpoints.md; tests/test_exercises.py checks them.

python -m docs.solutions.checkpoints runs/trial/step_00000003      the sizes in a checkpoint
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Dtype, shape and place of each tensor of a safetensors file, and the byte at which the tensors begin."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    del header["__metadata__"]
    return header, 8 + size


def read_row(file: Path, name: str, row: int) -> bytes:
    """One row of a matrix, and no byte more than that of the file's tensors."""
    header, begin = read_header(file)
    (start, end), rows = header[name]["data_offsets"], header[name]["shape"][0]
    size = (end - start) // rows
    with file.open("rb") as opened:
        opened.seek(begin + start + row * size)
        return opened.read(size)


def sizes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Of each kind of tensors (model, exp_avg, ...) how many numbers there are, and in how many bytes."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file in sorted(checkpoint.glob("*.safetensors")):
        kind = file.name.removesuffix(".safetensors").partition("-")[0]
        for tensor in read_header(file)[0].values():
            numbers = 1
            for length in tensor["shape"]:
                numbers *= length
            start, end = tensor["data_offsets"]
            found[kind] = found[kind][0] + numbers, found[kind][1] + end - start
    return dict(found)


if __name__ == "__main__":
    found = sizes(Path(sys.argv[1]))
    numbers = found["model"][0]
    for kind, (_, size) in found.items():
        print(f"{kind:12}{size:12,} bytes, {size / numbers:g} for each of {numbers:,} parameters")
