"""Buckets: parameters that some ranks do not use, their order and sizes, and what is refused."""

import pytest
import torch
from torch import nn

from conformance.worker_pool import WorkerPool
from picotron.config import Training
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.llama import Llama
from picotron.model.placement import main_grad, place
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.process_group_manager import new_groups, setup_process_group_manager
from tests.fuzz.pipelines import WRAPPERS
from tests.support.oracle import assert_close, make_config, tiny_llama
from tests.support.training import full_tensor
from workbench.explain.fake_group import fake_rank


def different_weights(wrapper: str, tp: int, dtype: torch.dtype) -> None:
    grid = setup_process_group_manager(tp, 1, 1, 2 // tp)
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).to(dtype)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)
    module[1].bias.data[1] += grid.global_rank * 2**-8
    with pytest.raises(UserError, match=r"^1\.bias differs between ranks \[0, 1\]"):
        WRAPPERS[wrapper](module)


@pytest.mark.parametrize(
    ("wrapper", "tp", "dtype"),
    [("bucket", 2, torch.bfloat16), ("zero3", 1, torch.float64)],
)
def test_ranks_that_start_with_different_weights_are_an_error(
    pool: WorkerPool, wrapper: str, tp: int, dtype: torch.dtype
) -> None:
    pool.run(different_weights, 2, wrapper, tp, dtype)


class Branches(nn.Module):
    """A model that uses `common` and one branch per micro-batch; `never` gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(5, 5, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(5, 3, dtype=torch.float64) for _ in range(4))
        self.never = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.common(x)).square().mean()


# The branch that each rank uses in micro-batches 0, 1, 2. Ranks differ, and some branches are not in the last one.
ROUTES = [(0, 1, 2), (3, 2, 2)]


def inputs(rank: int, i: int) -> torch.Tensor:
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + i))


def branch_gradients(wrapper: str) -> list[torch.Tensor]:
    rank = setup_process_group_manager(1, 1, 1, 2).dp_rank
    model = WRAPPERS[wrapper](Branches())
    for _ in range(2):  # the second step must not depend on the first
        model.zero_grad()
        for i in (0, 1, 2):
            model.require_backward_grad_sync = i == 2
            model(inputs(rank, i), ROUTES[rank][i]).backward()
        model.finish_grad_sync()
    assert all(p.grad is None for p in model.parameters())
    return [full_tensor(p, "main_grad") for p in model.parameters()]


@pytest.mark.parametrize("wrapper", ["naive", "bucket", "zero1"])
def test_parameters_without_gradient_on_some_ranks_are_averaged(pool: WorkerPool, wrapper: str) -> None:
    model = Branches()
    for rank in (0, 1):
        for i in range(3):
            (model(inputs(rank, i), ROUTES[rank][i]) / 2).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for gradients in pool.run(branch_gradients, 2, wrapper):
        for gradient, right in zip(gradients, expected, strict=True):
            assert_close(gradient, right)


def norms(wrapper: str, zeroes_late: bool) -> list[float]:
    """Return the gradient norms of two steps. Gradients are set to zero after a step, or after the next forward."""
    rank = setup_process_group_manager(1, 1, 1, 2).dp_rank
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double())
    optimizer, found = AdamW(model, Training(), fused=False), []
    for step in range(2):
        for i in range(2):
            model.require_backward_grad_sync = i == 1
            loss = model(inputs(rank, 2 * step + i)).square().mean()
            if i == 0 and zeroes_late:
                optimizer.zero_grad()
            loss.backward()
        model.finish_grad_sync()
        found.append(clip_grad_norm(model, None).item())
        optimizer.step()
        if not zeroes_late:
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("wrapper", ["bucket", "zero1", "zero3"])
def test_gradients_may_be_set_to_zero_between_forward_and_backward(pool: WorkerPool, wrapper: str) -> None:
    assert pool.run(norms, 2, wrapper, True) == pool.run(norms, 2, wrapper, False)


def launches() -> list[str]:
    """Return the events of one step in order: each layer's backward, each bucket's launch and each wait."""
    setup_process_group_manager(1, 1, 1, 2)
    events: list[str] = []
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    for i, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, i=i: events.append(f"backward {i}"))
    model = DataParallelBucket(layers, bucket_mb=2 * 64 * 65 * 4 / 2**20)  # two layers fill a bucket
    for k, bucket in enumerate(model.buckets):
        launch, wait = bucket.launch, bucket.wait
        bucket.launch = lambda k=k, launch=launch: (events.append(f"launch {k}"), launch())
        bucket.wait = lambda k=k, wait=wait: (events.append(f"wait {k}"), wait())
    model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    events.append("end of backward")
    model.finish_grad_sync()
    return events


def test_buckets_are_reduced_during_backward(pool: WorkerPool) -> None:
    events = pool.run(launches, 2)[0]
    assert events.index("launch 0") < events.index("backward 1")  # layers 3 and 2 are reduced during 1
    rest = [e for e in events if not e.startswith("backward")]
    assert rest == ["launch 0", "launch 1", "end of backward", "wait 0", "wait 1"]


@pytest.mark.parametrize(("dp", "mib"), [(2, 25), (16, 64)])
def test_buckets_have_a_minimum_size_that_grows_with_the_group(dp: int, mib: int) -> None:
    config = tiny_llama(hidden_size=1024, intermediate_size=8192, num_attention_heads=8, num_hidden_layers=6)
    with fake_rank(0, make_config(distributed__dp_size=dp).distributed), torch.device("meta"):
        model = DataParallelBucket(Llama(config))
    in_order = [p for bucket in model.buckets for p in bucket.parameters]
    assert in_order == list(model.parameters())[::-1]
    sizes = [bucket.buffer.nbytes / 2**20 for bucket in model.buckets]
    assert len(sizes) > 3
    assert mib <= min(sizes[:-1])
    assert max(sizes) < mib + 33  # the largest matrix has 32 MiB, and the vectors before it are in its bucket


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_module_that_is_added_after_wrapping_is_refused(wrapper: str) -> None:
    layers = nn.Sequential(nn.Linear(5, 5))
    model = WRAPPERS[wrapper](layers)
    layers.append(nn.Linear(5, 5))
    optimizer = AdamW(model, Training(), fused=False)
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(UserError, match=r"1\.weight was added after"):
        optimizer.step()


@pytest.mark.usefixtures("_one_rank")
def test_gradients_that_only_an_optimizer_of_torch_has_cleared_are_refused() -> None:
    model = DataParallelBucket(nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 5)).sum().backward()
    model.finish_grad_sync()
    for parameter in model.parameters():
        parameter.grad = main_grad(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="call zero_grad of the wrapper"):
        model(torch.ones(1, 5)).sum().backward()


def summed_before_a_backward() -> None:
    grid = setup_process_group_manager(2, 1, 1, 1)
    torch.manual_seed(0)  # of equal weights
    layer = nn.Linear(5, 5, bias=False)
    place(layer.weight, sum_over=grid.tp_group)
    model = DataParallelBucket(layer)
    for _ in range(2):  # nothing has been summed yet
        model(torch.ones(1, 5)).sum().backward()
    model.finish_grad_sync()
    with pytest.raises(UserError, match="after the gradients of this step were averaged"):
        model(torch.ones(1, 5)).sum().backward()


def test_a_backward_after_partial_gradients_were_summed_is_refused(pool: WorkerPool) -> None:
    """Without replicas, too: the sum has other ranks' terms, and would be summed again."""
    pool.run(summed_before_a_backward, 2)


def pending_after_backward() -> int:
    """Return the number of buckets that wait for the end of the step. Each of two ranks holds the last layer alone."""
    setup_process_group_manager(1, 1, 1, 2)
    layers, alone = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), new_groups([[0], [1]])
    for parameter in layers[1].parameters():
        place(parameter, average_over=alone)
    model = DataParallelBucket(layers, bucket_mb=0.0)
    model(torch.ones(1, 5)).sum().backward()
    return len(model.pending_buckets)


def test_a_layer_on_one_rank_holds_back_no_reduction(pool: WorkerPool) -> None:
    assert pool.run(pending_after_backward, 2) == [0, 0]
