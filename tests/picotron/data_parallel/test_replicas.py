"""Parameters whose gradient is averaged over other ranks than those of cp_dp: two experts on four ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.fuzz.pipelines import TRAINING, WRAPPERS
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.placement import place
from picotron.optimizer import AdamW, update_weights
from picotron.process_group_manager import new_groups, setup_process_group_manager
from picotron.tensor_parallel.tp_communications import all_gather, reduce_scatter
from tests.support.oracle import assert_close, torch_adamw

RANKS, ROWS, D, STEPS = 4, 3, 6, 3


def initial(name: str) -> nn.Linear:
    layer = nn.Linear(D, D).double()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return layer


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


class Experts(nn.Module):
    """A dense layer, and a linear expert for the rows whose first number is positive, another one for the others."""

    def __init__(self, held: list[int]) -> None:
        super().__init__()
        self.dense, self.experts = initial("dense"), nn.ModuleDict({str(i): initial(f"expert {i}") for i in held})

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        group = self.group if len(self.experts) == 1 else None
        rows = x if group is None else all_gather(x, group, 0)
        chosen = (rows[:, :1] <= 0).long()
        y = sum((expert(rows) * (chosen == int(i)) for i, expert in self.experts.items()), torch.zeros_like(rows))
        return F.silu(x + (y if group is None else reduce_scatter(y, group, 0))).square().mean()


def train(engine: str) -> dict[str, Tensor]:
    """Train on four ranks, of which two consecutive ones hold the two experts."""
    grid = setup_process_group_manager(1, 1, 1, RANKS)
    model = Experts([grid.dp_rank % 2])
    model.group, others = new_groups([[0, 1], [2, 3]]), new_groups([[0, 2], [1, 3]])
    for parameter in model.experts.parameters():
        place(parameter, average_over=others, gradient_scale=1 / 2)
    wrapped = WRAPPERS[engine](model)
    optimizer = AdamW(wrapped, TRAINING, fused=False)
    norms = []
    for step in range(STEPS):
        wrapped(inputs(step, pgm.process_group_manager.dp_rank)).backward()
        norms.append(update_weights(wrapped, optimizer, TRAINING.max_grad_norm))
    wrapped.close()
    return {"norms": torch.stack(norms)} | {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("engine", list(WRAPPERS))
def test_experts_equal_one_process(pool: WorkerPool, engine: str) -> None:
    model = Experts([0, 1])
    optimizer, norms = torch_adamw(model.parameters(), TRAINING), []
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(inputs(step, rank)) for rank in range(RANKS)]).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), TRAINING.max_grad_norm))
        optimizer.step()
    expected = {"norms": torch.stack(norms)} | {name: p.detach() for name, p in model.named_parameters()}
    for found in pool.run(train, RANKS, engine):
        for name, value in found.items():
            assert_close(value, expected[name], what=name)


def pending_after_backward() -> int:
    """Return the number of buckets that wait for the end of the step. Each of two ranks holds one expert alone."""
    grid = setup_process_group_manager(1, 1, 1, 2)
    model = Experts([grid.dp_rank])
    model.group, alone = new_groups([[0, 1]]), new_groups([[0], [1]])
    for parameter in model.experts.parameters():
        place(parameter, average_over=alone, gradient_scale=1 / 2)
    wrapped = DataParallelBucket(model, bucket_mb=0.0)
    wrapped(inputs(0, grid.dp_rank)).backward()
    return len(wrapped.pending_buckets)


def test_an_expert_on_one_rank_holds_back_no_reduction(pool: WorkerPool) -> None:
    assert pool.run(pending_after_backward, 2) == [0, 0]
