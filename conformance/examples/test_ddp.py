"""Tests of a trainer in its own repository: one for each row, with the first wrong tensor of the first that differs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.check import Checker

ADAPTER = Path(__file__).with_name("ddp.py")
ROWS = Checker(ADAPTER).plan(only=("step", "run"), layouts=("dp2",))


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker(ADAPTER, trace=None) as checker:
        yield checker


@pytest.mark.parametrize(("chapter", "layout", "other"), ROWS)
def test_the_trainer_is_equal(checker: Checker, chapter: str, layout: str, other: str) -> None:
    row = checker.check(chapter, layout, other)
    assert not row.is_bad, f"{row}\n{row.log}"
