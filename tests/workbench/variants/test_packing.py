"""Packing: every sample in exactly one row, rows nearly full, and the same rows every time."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.run.token_files import Samples
from workbench.variants.samples import SampleRows, pack, pack_samples

SIZES = st.lists(st.integers(1, 12), max_size=60)


def samples_of(parts: list[tuple[list[int], list[int]]]) -> Samples:
    """Join samples, given as tokens and mask."""
    tokens, counted = ([x for part in parts for x in part[i]] for i in (0, 1))
    lengths = np.array([len(part[0]) for part in parts], np.int64)
    return Samples(np.array(tokens, np.uint16), np.array(counted, np.uint8), lengths)


def random_samples(count: int, longest: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return samples whose tokens are all different, so that each is found again in the rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    ends = lengths.cumsum()
    return [
        (list(range(end - length, end)), rng.integers(0, 2, length).tolist())
        for end, length in zip(ends, lengths, strict=True)
    ]


def samples_in(rows: SampleRows) -> list[list[tuple[list[int], list[int]]]]:
    """Take the samples out of each row again: their tokens, and the mask of all but the first token."""
    found: list[list[Any]] = [[] for _ in range(len(rows))]
    for i in range(len(rows)):
        row = rows[i]
        assert row.documents is not None
        assert row.counted is not None
        assert row.documents.sum() == len(row.input_ids) == len(row.target_ids) == len(row.counted) == rows.seq_length
        assert rows.counts[i] == row.counted.sum()
        start = 0
        for length in row.documents:
            inputs, targets, counted = (x[start : start + length].tolist() for x in row[:3])
            start += length
            if not any(counted) and start == rows.seq_length:
                assert inputs == targets == [0] * length  # padding
            else:
                assert inputs[1:] == targets[:-1]
                found[i].append((inputs + targets[-1:], counted))
    return found


def expected(parts: list[tuple[list[int], list[int]]], length: int, drops_long: bool) -> list[Any]:
    """State without arrays which samples are packed."""
    cut = [(tokens[: length + 1], mask[1 : length + 1]) for tokens, mask in parts]
    kept = [len(tokens) <= length + 1 or not drops_long for tokens, _ in parts]
    return [part for part, keep in zip(cut, kept, strict=True) if keep and any(part[1])]


def naive_loads(sizes: list[int], capacity: int) -> list[int]:
    """Pack by best-fit decreasing, looking at every row for every item."""
    loads = []
    for size in sorted(sizes, reverse=True):
        fits = [load for load in loads if load + size <= capacity]
        if fits:
            loads.remove(max(fits))
        loads.append(max(fits, default=0) + size)
    return loads


@given(sizes=SIZES, capacity=st.integers(12, 30))
def test_rows_are_those_of_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    rows = pack(np.array(sizes, np.int64), capacity)
    loads = np.bincount(rows, sizes).tolist() if sizes else []
    assert sorted(loads) == sorted(naive_loads(sizes, capacity))


@settings(max_examples=100)
@given(
    seed=st.integers(0, 100),
    count=st.integers(0, 40),
    length=st.integers(4, 20),
    drops_long=st.booleans(),
    multiple=st.integers(1, 5),
)
def test_rows_hold_every_sample_once(seed: int, count: int, length: int, drops_long: bool, multiple: int) -> None:
    """Samples keep their order within a row, and the rows that of their first samples, so that without shuffling,
    training reads the data roughly from the beginning to the end.
    """
    parts = random_samples(count, longest=15, seed=seed)
    packed = pack_samples(samples_of(parts), length, drops_long, multiple=multiple)
    used = expected(parts, length, drops_long)
    rows = [row for row in samples_in(packed.rows) if row]  # others are padding
    assert rows == sorted(map(sorted, rows))
    assert sorted(itertools.chain(*rows)) == used
    assert len(packed.rows) % multiple == 0
    assert (packed.rows.counts == 0).sum() < multiple
    assert packed.dropped == count - len(used)
    beginnings = [tokens[0] for tokens, _ in used]
    assert packed.cut == sum(len(tokens) > length + 1 and tokens[0] in beginnings for tokens, _ in parts)
