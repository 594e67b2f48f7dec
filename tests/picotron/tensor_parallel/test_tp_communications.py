"""Collectives of tensor parallelism: forward and backward, number and size per layer, and overlap."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather as torch_all_gather

from conformance.oracle import assert_close, tiny_llama
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel import overlapped
from picotron.tensor_parallel import tp_communications as comm
from tests.picotron.tensor_parallel.test_tensor_parallel import parallel_model


def pair(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and gradient of a pair, each next to its reference from torch's differentiable all-gather."""
    grid = setup_process_group_manager(dist.get_world_size(), 1, 1, 1)
    group, size, rank = grid.tp_group, grid.tp_world_size, grid.tp_rank
    rows = 6 if name in ("reduce_scatter", "copy_to_ranks", "reduce_from_ranks") else 2
    x = torch.randn(2, rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    whole_input = name == "copy_to_ranks"
    if whole_input:
        dist.broadcast(x, 0)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = getattr(comm, name)(ours, group)
    everyone = torch_all_gather(theirs)
    expected = {
        "copy_to_ranks": lambda: sum(everyone) / size,
        "reduce_from_ranks": lambda: sum(everyone),
        "gather_from_ranks": lambda: torch.cat(everyone, 1),
        "all_gather": lambda: torch.cat(everyone, 1),
        "reduce_scatter": lambda: sum(everyone).chunk(size, 1)[rank],
    }[name]()
    # Partial gradients differ between ranks. Replicated ones are identical, and torch's all-gather sums size copies.
    generator = torch.Generator().manual_seed(100 + rank)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    if name in ("reduce_from_ranks", "gather_from_ranks"):
        dist.broadcast(dy, 0)
    y.backward(dy)
    expected.backward(dy / size if name in ("reduce_from_ranks", "gather_from_ranks") else dy)
    if whole_input:  # the reference averages a replicated input, so its gradient is size times too small
        theirs.grad *= size
    assert torch.equal(x, ours.detach()), "not out of place"
    return y.detach(), expected.detach(), ours.grad, theirs.grad


@pytest.mark.parametrize(
    "name", ["copy_to_ranks", "reduce_from_ranks", "gather_from_ranks", "all_gather", "reduce_scatter"]
)
def test_communication_pairs_equal_torch(pool: WorkerPool, name: str) -> None:
    for y, expected, dx, expected_dx in pool.run(pair, 3, name):
        assert_close(y, expected, 1e-14, "forward")
        assert_close(dx, expected_dx, 1e-14, "backward")


def traffic(sequence_parallel: bool) -> dict[str, list[tuple[str, int]]]:
    """Return (collective, elements of the full tensor) for one forward and one backward of a decoder layer."""
    setup_process_group_manager(2, 1, 1, 1)
    layer = parallel_model(tiny_llama(num_hidden_layers=1), sequence_parallel).model.layers["0"]
    sent: list[tuple[str, int]] = []
    originals = {name: getattr(comm, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            large = max(a.numel() for a in arguments if isinstance(a, Tensor))
            if large > 1000:  # excludes the gradients of the norms' weights
                sent.append((name, large))
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(comm, name, counted(name))
    try:
        x = torch.randn(2, 16 if sequence_parallel else 32, 32, dtype=torch.float64, requires_grad=True)
        cos = torch.ones(1, 32, 1, 4, dtype=torch.float64)
        y = layer(x, cos, 0 * cos)
        forward = list(sent)
        sent.clear()
        y.sum().backward()
        return {"forward": forward, "backward": list(sent)}
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)


def test_layer_sends_the_collectives_of_the_papers(pool: WorkerPool) -> None:
    """Two all-reduces of (B, T, D) in forward and two in backward (Shoeybi et al., section 3).

    With sequence parallelism, an all-gather and a reduce-scatter replace each, and backward gathers the two inputs that
    forward did not keep (Korthikanti et al., section 4.2).
    """
    whole = 2 * 32 * 32
    plain = pool.run(traffic, 2, False)[0]
    assert plain == {"forward": [("all_reduce", whole)] * 2, "backward": [("all_reduce", whole)] * 2}
    gather, scatter = ("all_gather_single", whole), ("reduce_scatter_single", whole)
    split = pool.run(traffic, 2, True)[0]
    assert split["forward"] == [gather, scatter] * 2
    assert sorted(split["backward"]) == [gather] * 4 + [scatter] * 2


def events_of_backward(sequence_parallel: bool) -> list[str]:
    """Return the events of a column-parallel backward in order: start and end of each collective, and each product."""
    setup_process_group_manager(2, 1, 1, 1)
    events: list[str] = []
    names = {"start_sum": "dx", "start_all_gather": "x"}
    originals = {name: getattr(overlapped, name) for name in names}

    def noted(name: str) -> Any:
        def start(*arguments: Any) -> Any:
            events.append(f"{names[name]} leaves")
            finish = originals[name](*arguments)
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
    (y,) = overlapped.ColumnParallel.apply(x, group, sequence_parallel, weight)
    for name in names:
        setattr(overlapped, name, noted(name))
    try:
        with Multiplications():
            y.sum().backward()
    finally:
        for name, original in originals.items():
            setattr(overlapped, name, original)
    return events


def test_collectives_overlap_with_the_computation_of_gradients(pool: WorkerPool) -> None:
    assert pool.run(events_of_backward, 2, False)[0] == ["compute dx", "dx leaves", "compute dW", "dx arrives"]
    assert pool.run(events_of_backward, 2, True)[0] == [
        "x leaves", "compute dx", "dx leaves", "x arrives", "compute dW", "dx arrives",
    ]  # fmt: skip
