"""Collectives of tensor parallelism overlap with the computation of gradients."""

from typing import Any
from unittest import mock

import torch

from picotron import process_group_manager as pgm
from picotron.config import Distributed
from picotron.tensor_parallel import tensor_parallel
from workbench.explain.fake_group import fake_rank


def events_of_backward(sequence_parallel: bool) -> list[str]:
    """Return the events of a column-parallel backward in order: start and end of each collective, and each product."""
    events: list[str] = []
    names = {"start_sum": "dx", "start_all_gather": "x"}

    def noted(name: str) -> Any:
        original = getattr(tensor_parallel, name)

        def start(*arguments: Any) -> Any:
            events.append(f"{names[name]} leaves")
            finish = original(*arguments)
            return lambda: (events.append(f"{names[name]} arrives"), finish())[1]

        return start

    class Multiplications(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.mm.default:
                events.append("compute dW" if result.shape == (7, 5) else "compute dx")
            return result

    x, weight = torch.randn(2, 4, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    group = pgm.process_group_manager.tp_group
    (y,) = tensor_parallel.ColumnParallel.apply(x, group, sequence_parallel, weight)
    with mock.patch.multiple(tensor_parallel, **{name: noted(name) for name in names}), Multiplications():
        y.sum().backward()
    return events


def test_collectives_overlap_with_the_computation_of_gradients() -> None:
    with fake_rank(0, Distributed(tp_size=2)):
        assert events_of_backward(False) == ["compute dx", "dx leaves", "compute dW", "dx arrives"]
        assert events_of_backward(True) == [
            "x leaves", "compute dx", "dx leaves", "x arrives", "compute dW", "dx arrives",
        ]  # fmt: skip
