"""Writer of arrays that do not fit into memory."""

from pathlib import Path
from types import TracebackType

import numpy as np

from picotron.files import create


class ArrayFile:
    """A one-dimensional array in an .npy file, written part by part."""

    def __init__(self, path: Path, dtype: type) -> None:
        self.dtype, self.count = dtype, 0
        self.file = open(path, "wb", opener=create)  # noqa: SIM115 (closed by __exit__)
        self._write_header()
        self.start = self.file.tell()

    def _write_header(self) -> None:
        header = {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype
        self.file.write(values.tobytes())
        self.count += len(values)

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Write the final header, which has the same size, because numpy leaves room in it for any number of items."""
        with self.file:
            self.file.seek(0)
            self._write_header()
            assert self.file.tell() == self.start
