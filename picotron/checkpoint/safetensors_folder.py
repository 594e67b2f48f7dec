"""Folders of safetensors files: read slice by slice, written piece by piece, checked byte by byte.

A file is 8 bytes with the length of a header, the header (JSON: each tensor's dtype, shape and place), and the tensors,
one after the other. So whoever knows dtypes and shapes knows the place of every byte before the first is written:
several processes can write one file, and none needs to have more than one tensor in memory. (The safetensors library
only writes what is in memory as a whole; it reads all that is written here.)
"""

import dataclasses
import json
import os
from pathlib import Path

import torch
import xxhash
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from picotron.errors import UserError, first_line
from picotron.weights import Index

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
CHUNK = 2**20  # bytes to read at once


def find_folder(name: str) -> Path:
    """`name` itself if it is a local folder, else the local copy of that hub model (downloaded at the first use)."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # whatever the hub's client throws: no such model, no network, no permission
        raise UserError(
            f"model.name={name!r} is no local folder and cannot be downloaded ({first_line(error)}); check the name, or give a folder"
        ) from None


class SafetensorsFolder:
    """The tensors of `{kind}.safetensors`, or of the files that `{kind}.safetensors.index.json` lists.

    Raises:
        UserError: there is no such file, or it is damaged.
    """

    def __init__(self, folder: Path, kind: str = "model") -> None:
        self.folder = folder
        index = folder / f"{kind}.safetensors.index.json"
        try:
            if index.exists():
                weight_map = json.loads(index.read_text())["weight_map"]
                self.file_of = {name: folder / file for name, file in weight_map.items()}
            else:
                single = folder / f"{kind}.safetensors"
                with safe_open(single, framework="pt") as file:
                    self.file_of = dict.fromkeys(file.keys(), single)
        except FileNotFoundError:
            raise UserError(
                f"{folder} has no {kind}.safetensors and no {kind}.safetensors.index.json; only safetensors are read, so save "
                f"the model with transformers' save_pretrained first"
            ) from None
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"the safetensors of {folder} are damaged ({error}); fetch or save them again") from None

    def read(self, name: str, shape: torch.Size, index: Index = ()) -> Tensor:
        """The part `[index]` of one tensor, which should have `shape` as a whole; only that part is read.

        Raises:
            UserError: the folder does not have it, it has another shape, or its file is missing or damaged.
        """
        if name not in self.file_of:
            raise UserError(
                f"{self.folder} has no tensor {name}; is it a model of the same architecture and number of layers?"
            )
        path = self.file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_slice(name)
                if tensor.get_shape() != list(shape):
                    raise UserError(f"{name} of {path} has shape {tensor.get_shape()}; the model expects {list(shape)}")
                return tensor[index or ...]
        except FileNotFoundError:
            raise UserError(f"{path}, named by the index of {self.folder}, is missing; fetch it again") from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}); fetch or save it again") from None


def plan_file(tensors: dict[str, tuple[torch.dtype, torch.Size]]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file that holds tensors of these dtypes and shapes, and the byte at which each begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


@dataclasses.dataclass(frozen=True)
class ByteRange:
    """A part of a file: where it begins, its length in bytes, and their checksum (XXH3, 64 bits, hexadecimal)."""

    start: int
    size: int
    xxh3: str


class FileWriter:
    """Writes parts of a file, of which other processes may write others at the same time.

    What goes wrong is kept for `close` to raise: a process with a full disk still has to answer the messages of others.
    """

    def __init__(self, path: Path) -> None:
        self.ranges: list[ByteRange] = []
        self.error: OSError | None = None
        try:
            # Not emptied: what others have written stays.
            self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
        except OSError as error:
            self.error = error

    def write(self, start: int, data: bytes | memoryview) -> None:
        if self.error is None:
            try:
                self.file.seek(start)
                rest = memoryview(data)
                while rest:
                    rest = rest[self.file.write(rest) :]
                self.ranges.append(ByteRange(start, len(data), xxhash.xxh3_64_hexdigest(data)))
            except OSError as error:
                self.error = error
                self.file.close()

    def close(self) -> list[ByteRange]:
        """Returns when the bytes are on the disk. Raises OSError if any are not."""
        if self.error is not None:
            raise self.error
        with self.file:
            os.fsync(self.file.fileno())
        return self.ranges


def write_file(path: Path, content: bytes) -> list[ByteRange]:
    """A whole file at once. Raises OSError."""
    writer = FileWriter(path)
    writer.write(0, content)
    return writer.close()


def check_range(path: Path, expected: ByteRange) -> None:
    """Raises UserError unless the bytes of this part of a file are what was written."""
    checksum, rest, buffer = xxhash.xxh3_64(), expected.size, memoryview(bytearray(min(expected.size, CHUNK)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(expected.start)
            while rest and (count := file.readinto(buffer[:rest])):
                checksum.update(buffer[:count])
                rest -= count
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from None
    if checksum.hexdigest() != expected.xxh3:
        raise UserError(
            f"{path} is damaged: the checksum of bytes {expected.start} to {expected.start + expected.size} is {checksum.hexdigest()}, "
            f"but {expected.xxh3} was written"
        )
