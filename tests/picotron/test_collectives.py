"""docs/programs/collectives.py: results, and bytes sent."""

import sys

import pytest

from conformance.worker_pool import WorkerPool
from docs.programs.collectives import COLLECTIVES, before_and_after, full_tensors_sent

EVERYTHING = [[10 * rank + block for block in range(4)] for rank in range(4)]
SUM = [60, 64, 68, 72]
DIAGONAL = [0, 11, 22, 33]
RESULTS = {
    "send_recv": [EVERYTHING[0], EVERYTHING[0], [], []],
    "broadcast": [EVERYTHING[0]] * 4,
    "scatter": [[block] for block in EVERYTHING[0]],
    "gather": [DIAGONAL, [], [], []],
    "all_gather": [DIAGONAL] * 4,
    "reduce_scatter": [[block] for block in SUM],
    "all_reduce": [SUM] * 4,
    "all_reduce_in_parts": [SUM] * 4,
    "all_to_all": [list(column) for column in zip(*EVERYTHING, strict=True)],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_results(pool: WorkerPool, name: str) -> None:
    assert [after for _, after in pool.run(before_and_after, 4, name)] == RESULTS[name]


def sent_in_all() -> dict[str, float]:
    return {name: full_tensors_sent(name) for name in COLLECTIVES}


@pytest.mark.skipif(sys.platform != "linux", reason="bytes are counted by Linux")
@pytest.mark.parametrize("n", [2, 4])
def test_bytes_sent_equal_the_formulas(pool: WorkerPool, n: int) -> None:
    by_rank = pool.run(sent_in_all, n)
    for name, collective in COLLECTIVES.items():
        # gloo runs a reduce-scatter as an all-reduce
        formula = collective.sent_by(n) * (2 if name == "reduce_scatter" else 1)
        assert sum(sent[name] for sent in by_rank) == pytest.approx(formula, rel=2e-3), name
