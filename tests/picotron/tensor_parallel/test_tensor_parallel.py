"""Layers of tensor parallelism: where they break a graph. (Their rounding in bfloat16 is in test_conformance.)"""

import pytest
import torch

from conformance.worker_pool import WorkerPool
from picotron.model.llama import Llama, rope
from picotron.model.weights import materialise
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from tests.support.oracle import drawn_weights, tiny_llama
from tests.support.training import CPU


def graph_breaks(sequence_parallel: bool) -> list[str]:
    setup_process_group_manager(2, 1, 1, 1)
    config = tiny_llama()
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(config).to(torch.float64), sequence_parallel)
    materialise(model, CPU, drawn_weights(config, 42))
    x = torch.zeros(2, 16 // (1 + sequence_parallel), config.hidden_size, dtype=torch.float64)
    tables = rope(model.frequencies, torch.arange(16)[None])
    explanation = torch._dynamo.explain(model.model.layers["0"])(x, *(table.double() for table in tables))
    return [str(reason.reason) for reason in explanation.break_reasons]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_compiled_layers_break_only_at_their_four_communications(pool: WorkerPool, sequence_parallel: bool) -> None:
    """Those in attention and MLP also break the layer, from which both are called."""
    reasons = pool.run(graph_breaks, 2, sequence_parallel)[0]
    assert len(reasons) == 6
    assert all("torch.compiler.disable" in reason for reason in reasons), reasons
