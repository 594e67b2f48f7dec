"""Packing: which samples share a row, so that rows of seq_length positions are full."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from picotron.rows import SampleRows, Samples

CHUNK = 2**12  # samples whose targets are counted at a time


def best_fit(sizes: Iterable[int], capacity: int, limit: float = math.inf) -> list[int]:
    """Put items into rows, one after the other: each into the row with the least free space that is enough for it, or
    into a new row. Ends before the first item that would need more than `limit` rows.

    Returns:
        The row of each item.
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
        elif count < limit:
            free, row = capacity, count
            count += 1
        else:
            break
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
    return by_first_item(rows)


def by_first_item(rows: np.ndarray) -> np.ndarray:
    """Renumber rows in the order of their first items."""
    _, first, rows = np.unique(rows, return_index=True, return_inverse=True)
    return first.argsort().argsort()[rows]


def count_targets(counted: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Count the targets that the loss counts, of samples with `sizes` > 0 positions from tokens `starts` on."""
    counts = [np.empty(0, np.int64)]
    for i in range(0, len(sizes), CHUNK):  # numpy converts the slice of `counted` to 8 bytes per token
        first, last = starts[i : i + CHUNK], starts[i : i + CHUNK] + sizes[i : i + CHUNK]
        bounds = np.stack((first + 1, last + 1), axis=1).ravel()[:-1]  # the last sum ends with the slice
        sums = np.add.reduceat(counted[bounds[0] : last[-1] + 1], bounds - bounds[0], dtype=np.int64)
        counts.append(sums[::2])  # the other sums are of tokens between the samples
    return np.concatenate(counts)


class Packed(NamedTuple):
    """Samples in rows.

    Args:
        training, evaluation: rows of different samples.
        cut: number of samples of which only the beginning is in a row.
        dropped: number of samples that are in no row.
    """

    training: SampleRows
    evaluation: SampleRows
    cut: int
    dropped: int

    @property
    def empty(self) -> float:
        """Fraction of the positions that no sample takes."""
        positions = (len(self.training) + len(self.evaluation)) * self.training.seq_length
        return 1 - (self.training.sizes.sum() + self.evaluation.sizes.sum()) / max(1, positions)


def pack_samples(
    samples: Samples,
    seq_length: int,
    held_out: int = 0,
    drops_long: bool = False,
    masks_documents: bool = True,
    evaluated: int | None = None,
) -> Packed:
    """Pack samples into rows.

    Args:
        held_out: number of rows that are held out. They get the last samples, up to the first that fits into none of
            them; the training rows get all others.
        drops_long: whether to drop samples that take more than seq_length positions, or to cut them.
        masks_documents: see `SampleRows`.
        evaluated: number of the rows held out that become evaluation rows; by default all.
    """
    starts, sizes = np.cumsum(samples.lengths) - samples.lengths, samples.lengths - 1
    used = (sizes > 0) & (sizes <= seq_length if drops_long else True)
    starts, is_long, sizes = starts[used], sizes[used] > seq_length, np.minimum(sizes[used], seq_length)
    counts = count_targets(samples.counted, starts, sizes)
    useful = counts > 0
    starts, is_long, sizes, counts = starts[useful], is_long[useful], sizes[useful], counts[useful]

    evaluation = np.array(best_fit(sizes[::-1].tolist(), seq_length, held_out)[::-1], np.int64)
    cut = len(sizes) - len(evaluation)

    held_out_rows = by_first_item(evaluation)
    read = held_out_rows < (held_out if evaluated is None else evaluated)

    def rows(which: slice | np.ndarray, numbers: np.ndarray) -> SampleRows:
        return SampleRows(samples, starts[which], sizes[which], counts[which], numbers, seq_length, masks_documents)

    return Packed(
        rows(slice(cut), pack(sizes[:cut], seq_length)),
        rows(np.flatnonzero(read) + cut, held_out_rows[read]),
        cut=int(is_long.sum()),
        dropped=len(samples.lengths) - len(sizes),
    )
