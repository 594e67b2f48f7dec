"""Layers of tensor parallelism: where they break a graph. (Their rounding in bfloat16 is in test_conformance.)"""

import pytest
import torch

from conformance.worker_pool import WorkerPool
from picotron.model.llama import rope
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import stage_of


def graph_breaks(sequence_parallel: bool) -> list[str]:
    config = make_config("tp2", sequence_parallel=sequence_parallel)
    model = stage_of(config, tiny_llama()).module
    x = torch.zeros(2, 16 // (1 + sequence_parallel), 32, dtype=torch.float64)
    tables = rope(model.frequencies, torch.arange(16)[None])
    explanation = torch._dynamo.explain(model.model.layers["0"])(x, *(table.double() for table in tables))
    return [str(reason.reason) for reason in explanation.break_reasons]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_compiled_layers_break_only_at_their_four_communications(pool: WorkerPool, sequence_parallel: bool) -> None:
    """Those in attention and MLP also break the layer, from which both are called."""
    reasons = pool.run(graph_breaks, 2, sequence_parallel)[0]
    assert len(reasons) == 6
    assert all("torch.compiler.disable" in reason for reason in reasons), reasons
