"""Safetensors files: read by tensor slices, written and checked by byte ranges.

A file consists of 8 bytes with the length of a header, the header (JSON: dtype, shape and offset of each tensor), and
the tensors, one after the other. Dtypes and shapes therefore determine the offset of every byte before anything is
written, so several processes can write one file, and none needs more than one tensor in memory. (The safetensors
library can read these files, but it can only write a file whose tensors are all in memory.)
"""

import contextlib
import dataclasses
import difflib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from picotron.console import UserError
from picotron.model.placement import Index
from workbench.console import first_line
from workbench.files import read_object
from workbench.run.hub import connect

logger = logging.getLogger("picotron")

DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
BLOCKS, BLOCK = 64, 2**12  # number and bytes of the blocks of a file that its fingerprint depends on


def find_folder(name: str) -> Path:
    """Return the folder of a model: `name` if that is a local folder, else the local copy of a hub model.

    Raises:
        UserError: there is neither a folder nor a hub model of this name.
    """
    if os.path.isdir(name):  # False without permission, unlike `Path.is_dir`
        return Path(name)
    try:
        connect(name)
        tokenizer_files = ["*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", *tokenizer_files]))
    except Exception as error:  # the hub client raises many types: no such model, no network, no permission
        raise UserError(
            f"{name!r} is not a local folder and cannot be downloaded ({first_line(error)}); check the "
            f"name, or use a folder"
        ) from None


def file_name(name: Any) -> str:
    """Return a name from an index. Raises ValueError unless it is the name of a file in the same folder."""
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise ValueError(f"the index names {name!r}, which is not a file name")
    return name


class SafetensorsFolder:
    """Reader of the tensors in `{kind}.safetensors`, or in the files that `{kind}.safetensors.index.json` lists.

    Attributes:
        file_of: the file of each tensor.

    Raises:
        UserError: there is neither file, or it is damaged.
    """

    def __init__(self, folder: Path, kind: str = "model") -> None:
        self.folder = folder
        index, single = folder / f"{kind}.safetensors.index.json", folder / f"{kind}.safetensors"
        try:
            if index.exists() and not single.exists():  # transformers prefers the single file
                weight_map = read_object(index)["weight_map"]
                self.file_of = {name: folder / file_name(file) for name, file in weight_map.items()}
            else:
                with safe_open(single, framework="pt") as file:
                    self.file_of = dict.fromkeys(file.keys(), single)
            if kind == "model" and (folder / "adapter_config.json").exists():
                logger.warning("the adapter in %s is ignored; merge it into the weights first, as peft does", folder)
        except FileNotFoundError:
            raise UserError(
                f"{folder} has no readable {kind}.safetensors or {kind}.safetensors.index.json; only safetensors are read, so "
                f"save the model with transformers' save_pretrained first"
            ) from None
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"the safetensors of {folder} are damaged ({error}); download or save them again") from None

    def fingerprint(self) -> str:
        """Return a hash of the sizes of all files and of blocks spread over them. Two sets of weights have different
        hashes, unless they differ in a few numbers only.
        """
        digest = xxhash.xxh3_64()
        for path in sorted({*self.file_of.values()}):
            with self._reading(path), path.open("rb", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name} {size}".encode())
                for start in range(0, size, max(BLOCK, size // BLOCKS)):
                    file.seek(start)
                    digest.update(file.read(BLOCK))
        return digest.hexdigest()

    def read(self, name: str, shape: torch.Size, index: Index = ()) -> Tensor:
        """Read the slice `[index]` of a tensor, and nothing else.

        Args:
            shape: full shape that the tensor should have.

        Raises:
            UserError: the tensor is missing, has another shape, or is quantised, or its file is missing or damaged.
        """
        if name not in self.file_of:
            closest = "".join(difflib.get_close_matches(name, self.file_of, 1, cutoff=0.0)) or "none"
            raise UserError(
                f"{self.folder} has no tensor {name}; of its {len(self.file_of)} tensors, {closest} has the closest name. Rename "
                f"its tensors, or correct its config.json, such as num_hidden_layers or tie_word_embeddings"
            )
        path = self.file_of[name]
        with self._reading(path), safe_open(path, framework="pt") as file:
            tensor = file.get_slice(name)
            if tensor.get_shape() != list(shape):
                raise UserError(f"{name} of {path} has shape {tensor.get_shape()}, but the model expects {list(shape)}")
            if tensor.get_dtype() not in DTYPES.values():  # numbers of another format, with scales of their own
                raise UserError(
                    f"{name} of {path} is in {tensor.get_dtype()}, but weights should be in {', '.join(DTYPES.values())}; a quantised "
                    f"model has to be dequantised first, such as by transformers with dequantize=True"
                )
            return tensor[index or ...]

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Context in which a failure to read a file raises a UserError."""
        try:
            yield
        except (FileNotFoundError, PermissionError):
            raise UserError(
                f"{path} is missing or cannot be read; check its permissions, or download it again"
            ) from None
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is damaged ({error}); download or save it again") from None


def plan_file(tensors: dict[str, tuple[torch.dtype, torch.Size]]) -> tuple[bytes, dict[str, int]]:
    """Lay out a file with tensors of these dtypes and shapes.

    Returns:
        The first bytes of the file, up to the first tensor, and the offset of each tensor in bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # to align the tensors
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


@dataclasses.dataclass(frozen=True)
class ByteRange:
    """Range of `size` bytes of a file from offset `start`, with their checksum (XXH3, 64 bits, hexadecimal)."""

    start: int
    size: int
    xxh3: str


def write_file(path: Path, parts: Iterable[tuple[int, bytes | memoryview]]) -> list[ByteRange]:
    """Write parts of a file, each at its offset, until all of them are on the disk. Other processes may write others.

    After an error, the rest of the parts is still made, because a process with a full disk must take part in the
    collectives that make them.

    Raises:
        OSError: some bytes could not be written.
    """
    ranges, parts = list[ByteRange](), iter(parts)
    try:
        path.touch()  # and not truncated: other processes may have written their parts already
        with open(path, "r+b") as file:
            for start, data in parts:
                file.seek(start)
                file.write(data)
                ranges.append(ByteRange(start, len(data), xxhash.xxh3_64_hexdigest(data)))
            file.flush()
            os.fsync(file.fileno())
    finally:
        for _ in parts:
            pass
    return ranges


def check_range(path: Path, expected: ByteRange) -> None:
    """Raise a UserError unless a byte range of a file has the checksum with which it was written."""
    try:
        with path.open("rb") as file:
            file.seek(expected.start)
            checksum = xxhash.xxh3_64_hexdigest(file.read(expected.size))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from None
    if checksum != expected.xxh3:
        raise UserError(
            f"{path} is damaged: the checksum of bytes {expected.start} to {expected.start + expected.size} is {checksum}, "
            f"but should be {expected.xxh3}; use another checkpoint"
        )
