"""The parity grid: it covers every pair of features, and some layouts run here (`make parity` runs all)."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from conformance import grid
from conformance.adapters.picotron import config_of
from conformance.case import Case, sizes_of
from conformance.check import Checker
from conformance.grid import ADAPTER, LAYOUTS, LIMIT, errors_of
from conformance.models import WITH_EXPERTS
from picotron.model.families import FAMILIES
from workbench.schedules.schedules import SCHEDULES

EP_SIZES = {
    name: ("ep1", "ep2") if name == "mixtral" else ("ep1", "ep2", "ep4") for name in WITH_EXPERTS
}  # Mixtral has 6 experts here
SOME = "cp2 contiguous ring zero1 untied kv1 qwen3"


@pytest.mark.processes
def test_ten_steps_equal_one_process() -> None:
    errors = errors_of(Checker(ADAPTER, timeout=120), SOME)
    assert max(errors.values()) <= LIMIT, errors


def test_ranks_use_gpus_if_each_of_a_machine_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(Case, "batch", lambda *_: {"input_ids": torch.zeros(2, 8)})
    for gpus in range(4):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert config_of(Case("run", "dp2", tmp_path)).distributed.use_cpu == (gpus < 2)


def test_the_grid_is_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(grid, "Checker", lambda *_, **__: None)
    assert grid.main(["no layout"]) == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def choices(sizes: dict[str, int], family: str) -> list[tuple[str, ...]]:
    """Return the words of which a layout has one each: in `dp2 x pp2 zbv untied kv4 qwen3`, `bucket` is left out."""
    dp, pp, cp, tp = sizes.values()
    return [
        *((f"{axis}{size}",) for axis, size in sizes.items()),
        (*SCHEDULES, "auto") if pp > 1 else ("",),
        ("whole", "sp") if tp > 1 else ("",),
        ("zigzag", "contiguous") if cp > 1 else ("",),
        ("ring", "all_gather", "ulysses") if cp > 1 else ("",),
        ("bucket", "zero1", "zero3") if dp * cp > 1 else ("",),
        ("untied", "tied"),
        ("kv1", "kv4", "kv8"),
        (family,),
        EP_SIZES.get(family, ("",)),
    ]


def every_layout() -> Iterator[tuple[str, ...]]:
    """Yield all possible layouts on 2 to 16 ranks."""
    for numbers, family in itertools.product(itertools.product((1, 2, 4), repeat=4), FAMILIES):
        sizes = dict(zip(("dp", "pp", "cp", "tp"), numbers, strict=True))
        for words in itertools.product(*choices(sizes, family)) if 1 < math.prod(numbers) <= 16 else ():
            heads, experts = int(words[-3][2:]), int(words[-1][2:] or 1)
            heads_split = "ulysses" not in words or max(1, heads // sizes["tp"]) % sizes["cp"] == 0
            if heads_split and sizes["dp"] * sizes["cp"] % experts == 0 and "auto" not in words:
                yield words


def pairs(words: Iterable[str]) -> set[tuple[str, ...]]:
    return set(itertools.combinations(words, 2))


@pytest.mark.slow
def test_layouts_cover_every_pair_of_features() -> None:
    possible = set().union(*map(pairs, every_layout()))
    for name in LAYOUTS:
        named = {*name.split()}
        of_choices = choices(sizes_of(name), name.split()[-1])
        possible -= pairs(next((word for word in words if word in named), words[0]) for words in of_choices)
    assert not possible
