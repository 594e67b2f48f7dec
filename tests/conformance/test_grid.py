"""The parity grid: it covers every pair of features, and some layouts run here (`make parity` runs all)."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.check import Checker
from conformance.grid import ADAPTER, LAYOUTS, LIMIT, errors_of
from conformance.models import WITH_EXPERTS
from picotron.model.families import FAMILIES
from workbench.schedules.schedules import SCHEDULES

EP_SIZES = {name: (1, 2) if name == "mixtral" else (1, 2, 4) for name in WITH_EXPERTS}  # Mixtral has 6 experts here
SOME = "pp2 x cp2 zb_h1 contiguous ring zero1 untied kv1 qwen3"


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker(ADAPTER, timeout=120) as found:
        yield found


@pytest.mark.processes
def test_ten_steps_equal_one_process(checker: Checker) -> None:
    errors = errors_of(checker, SOME)
    assert max(errors.values()) <= LIMIT, errors


def features(name: str) -> dict[str, Any]:
    """What a layout is: `dp2 x pp2 zbv untied kv4 qwen3` -> {"dp": 2, "pp": 2, "cp": 1, "tp": 1, ...}."""
    words = name.split()
    sizes = {axis: next((int(w[2:]) for w in words if w[:2] == axis), 1) for axis in ("dp", "pp", "cp", "tp")}
    found: dict[str, Any] = dict(sizes)
    if sizes["pp"] > 1:
        found["pp_engine"] = next(word for word in words if word in (*SCHEDULES, "auto"))
        if "chunks2" in words:
            found["pp_chunks"] = 2
    if sizes["tp"] > 1:
        found["sequence_parallel"] = "sp" in words
    if sizes["cp"] > 1:
        found["cp_sharding"] = next(word for word in words if word in ("zigzag", "contiguous"))
        found["cp_engine"] = next(word for word in words if word in ("ring", "all_gather", "ulysses"))
    if words[-1] in WITH_EXPERTS:
        found["ep"] = next((int(word[2:]) for word in words if word[:2] == "ep"), 1)
    if sizes["dp"] * sizes["cp"] > 1:
        found["dp_engine"] = next((word for word in words if word in ("zero1", "zero3")), "bucket")
    return found | {"tied": "tied" in words, "kv": int(words[-2].removeprefix("kv")), "family": words[-1]}


def every_layout() -> Iterator[dict[str, Any]]:
    """Yield all possible layouts on 2 to 16 ranks."""
    sizes, engines = (1, 2, 4), ("ring", "all_gather", "ulysses")
    wrappers = ("bucket", "zero1", "zero3")
    for dp, pp, cp, tp in itertools.product(sizes, repeat=4):
        for schedule, sp, sharding, engine, wrapper, tied, kv, (family, ep) in itertools.product(
            SCHEDULES if pp > 1 else (None,),
            (False, True) if tp > 1 else (None,),
            ("zigzag", "contiguous") if cp > 1 else (None,),
            engines if cp > 1 else (None,),
            wrappers if dp * cp > 1 else (None,),
            (False, True),
            (1, 4, 8),
            [(name, size) for name in FAMILIES for size in EP_SIZES.get(name, (None,))],
        ):
            heads_split = engine != "ulysses" or max(1, kv // tp) % cp == 0
            if 1 < dp * pp * cp * tp <= 16 and heads_split and dp * cp % (ep or 1) == 0:
                found = {"pp_engine": schedule, "sequence_parallel": sp, "cp_sharding": sharding, "cp_engine": engine}
                found |= {"dp_engine": wrapper, "ep": ep}
                found |= {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "tied": tied, "kv": kv, "family": family}
                yield {key: value for key, value in found.items() if value is not None}


def pairs(layout: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(layout.items()), 2))


@pytest.mark.slow
def test_layouts_cover_every_pair_of_features() -> None:
    possible = set().union(*map(pairs, every_layout()))
    missing = possible - set().union(*(pairs(features(name)) for name in LAYOUTS))
    assert not missing
