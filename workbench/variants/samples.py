"""Rows of samples for fine-tuning, with the samples chosen so that the rows are full."""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from picotron.data.loader import Row, Rows
from workbench.run.token_files import Samples


class SampleRows(Rows):
    """Rows of samples. A sample of n tokens takes n - 1 positions: all but its last token are inputs, all but its first
    one targets. So no target belongs to another sample. Positions at the end of a row that no sample takes have token
    0, are not counted, and form a document.

    Args:
        samples: the data set.
        starts: (S,) first token of each sample that is used, in ascending order.
        sizes: (S,) number of positions that each of them takes.
        counts: (S,) number of targets that the loss counts in each of them.
        rows: (S,) row of each of them.
        seq_length: number of positions of a row.
        masks_documents: whether attention stays within a sample.
        count: number of rows, if it is larger than that of the rows with samples.
    """

    def __init__(
        self,
        samples: Samples,
        starts: np.ndarray,
        sizes: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray,
        seq_length: int,
        masks_documents: bool,
        count: int,
    ) -> None:
        self.samples, self.seq_length, self.masks_documents = samples, seq_length, masks_documents
        order = np.argsort(rows, kind="stable")  # within a row, samples keep their order
        self.starts, self.sizes = starts[order], sizes[order]
        # samples first[i] to first[i + 1] are in row i
        self.first = np.append(0, np.bincount(rows, minlength=count).cumsum())
        self.counts: np.ndarray = np.bincount(rows, counts, count).astype(np.int64)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, i: int) -> Row:
        input_ids, target_ids, counted = np.zeros((3, self.seq_length), np.int64)
        which = slice(self.first[i], self.first[i + 1])
        starts, sizes = self.starts[which], self.sizes[which]
        for start, position, size in zip(starts, sizes.cumsum() - sizes, sizes, strict=True):
            positions, inputs = slice(position, position + size), slice(start, start + size)
            targets = slice(start + 1, start + size + 1)
            input_ids[positions] = self.samples.tokens[inputs]
            target_ids[positions] = self.samples.tokens[targets]
            counted[positions] = self.samples.counted[targets]
        padding = self.seq_length - sizes.sum()
        documents = np.append(sizes, padding) if padding else sizes
        return Row(input_ids, target_ids, counted, documents if self.masks_documents else None)

    def identity(self) -> tuple[Any, np.ndarray]:
        digest = hashlib.sha256()
        for numbers in (self.first, self.starts, self.sizes, self.counts):
            digest.update(numbers.astype(np.int64).tobytes())
        first = self.starts.min(initial=len(self.samples.tokens))
        tokens = self.samples.tokens[first : (self.starts + self.sizes).max(initial=0) + 1]
        return digest.hexdigest(), np.concatenate((tokens[:1000], tokens[-1000:]))


def best_fit(sizes: Iterable[int], capacity: int) -> list[int]:
    """Put items into rows, one after the other: each into the row with the least free space that is enough for it, or
    into a new row. Returns the row of each item.
    """
    with_free: list[list[int]] = [[] for _ in range(capacity + 1)]  # the rows with a number of free positions
    numbers = 0  # bit n is set if there are rows with n free positions
    rows: list[int] = []
    count = 0
    for size in sizes:
        enough = numbers >> size
        if enough:
            free = size + (enough & -enough).bit_length() - 1  # the lowest set bit
            row = with_free[free].pop()
            if not with_free[free]:
                numbers ^= 1 << free
        else:
            free, row = capacity, count
            count += 1
        with_free[free - size].append(row)
        numbers |= 1 << free - size
        rows.append(row)
    return rows


def pack(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Pack items into rows by best-fit decreasing (Johnson et al. 1974): the longest first, see `best_fit`.

    Returns:
        The row of each item. Rows are numbered by their first items.
    """
    order = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    rows[order] = best_fit(sizes[order].tolist(), capacity)
    _, first, rows = np.unique(rows, return_index=True, return_inverse=True)
    return first.argsort().argsort()[rows]  # renumbered


class Packed(NamedTuple):
    """Samples in rows.

    Args:
        rows: the rows.
        cut: number of samples of which only the beginning is in a row.
        dropped: number of samples that are in no row.
    """

    rows: SampleRows
    cut: int
    dropped: int

    @property
    def empty(self) -> float:
        """Fraction of the positions that no sample takes."""
        return 1 - self.rows.sizes.sum() / max(1, len(self.rows) * self.rows.seq_length)


def pack_samples(
    samples: Samples,
    seq_length: int,
    drops_long: bool,
    masks_documents: bool = True,
    multiple: int = 1,
) -> Packed:
    """Pack samples into rows.

    Args:
        drops_long: whether to drop samples that take more than seq_length positions, or to cut them.
        masks_documents: see `SampleRows`.
        multiple: number of which the number of rows is a multiple; the last rows may have no samples.
    """
    starts, sizes = np.cumsum(samples.lengths) - samples.lengths, samples.lengths - 1
    used = (sizes > 0) & (sizes <= seq_length if drops_long else True)
    starts, is_long, sizes = starts[used], sizes[used] > seq_length, np.minimum(sizes[used], seq_length)
    counted = np.asarray(samples.counted)  # whose slices are faster than those of a mapped file
    targets = (counted[a + 1 : a + n + 1] for a, n in zip(starts.tolist(), sizes.tolist(), strict=True))
    counts = np.array([*map(np.count_nonzero, targets)], np.int64)
    useful = counts > 0
    starts, is_long, sizes, counts = starts[useful], is_long[useful], sizes[useful], counts[useful]

    numbers = pack(sizes, seq_length)
    count = -(-(numbers.max(initial=-1) + 1) // multiple) * multiple
    rows = SampleRows(samples, starts, sizes, counts, numbers, seq_length, masks_documents, count)
    return Packed(rows, cut=int(is_long.sum()), dropped=len(samples.lengths) - len(sizes))
