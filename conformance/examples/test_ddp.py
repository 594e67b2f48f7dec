"""Tests of a trainer in its own repository: one for each row, with the first wrong tensor of the first that differs."""

from pathlib import Path

import pytest

from conformance.check import Checker

ADAPTER = Path(__file__).with_name("ddp.py")
CHECKER = Checker(ADAPTER, trace=None)


@pytest.mark.parametrize(("chapter", "layout", "other"), [*CHECKER.plan(only=("step", "run"), layouts=("dp2",))])
def test_the_trainer_is_equal(chapter: str, layout: str, other: str) -> None:
    row = CHECKER.check(chapter, layout, other)
    assert not row.is_bad, f"{row}\n{row.log}"
