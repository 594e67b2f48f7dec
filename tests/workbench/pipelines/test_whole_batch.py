"""A step on a whole batch, with the calls of torch.distributed.pipelining, equals that of one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.placement import main_grad
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import assert_close
from tests.support.training import CPU
from workbench.pipelines.modules import Pipeline
from workbench.pipelines.whole_batch import WholeBatchStep
from workbench.schedules.schedules import build, forward_only

M, D = 3, 4


class Stage(nn.Module):
    """A stage with a mask (T, T) for all sequences of x (B, T, D), a scale for each token, (T, B), and a gain for each
    sequence, (B,).
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor, gain: Tensor) -> Tensor:
        return x + gain[:, None, None] * scale.T[..., None] * (mask @ torch.tanh(self.linear(x)))


class DictStage(Stage):
    """A last stage with outputs of several kinds, as models of Hugging Face have."""

    def forward(self, x: Tensor, **others: Tensor) -> Any:
        y = super().forward(x, **others)
        return {"logits": y, "both": (y * 2, None), "sum": y.sum()}


def stages_and_batch() -> tuple[list[Stage], Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    stages = [Stage(), Stage()]
    T, B = 5, 2 * M
    x, target = torch.randn(2, B, T, D, dtype=torch.float64)
    batch = {"mask": torch.rand(T, T).tril(), "scale": torch.rand(T, B), "gain": torch.rand(B)}
    return stages, x, target, {name: each.double() for name, each in batch.items()}


def steps(name: str) -> dict[str, Any]:
    """Run steps, also one whose outputs are of several kinds. Returns outputs, losses and gradients."""
    rank = setup_process_group_manager(1, 1, 2, 1).pp_rank
    stages, x, target, batch = stages_and_batch()
    schedule, dims = build(name, 2, M), {"scale": 1, "mask": None}

    def model_of(first: nn.Module, last: nn.Module) -> DataParallelBucket:
        receives = torch.empty_like(x[:2], device="meta")
        return DataParallelBucket(Pipeline({0: first, 1: last}, lambda *_: receives, schedule))

    def gradients() -> list[Tensor]:
        return [main_grad(each).clone() for each in model.module.stages[str(rank)].parameters()]

    model: Any = model_of(stages[0], last := DictStage())
    last.load_state_dict(stages[1].state_dict())
    step = WholeBatchStep(schedule, model, CPU, lambda y, target: F.mse_loss(y["logits"], target), dims)
    kinds = [step(x, target=target, **batch), WholeBatchStep(schedule, model, CPU, None, dims)(x, **batch)]
    kinds_gradients = gradients()
    with pytest.raises(UserError, match="should be a list"):
        step(x, target=target, losses=(), **batch)
    with pytest.raises(UserError, match="'scale' has 5 elements in dimension 0, which cannot be divided into 3"):
        WholeBatchStep(schedule, model, CPU, None, {"mask": None})(x, **batch)
    model.close()

    model, losses = model_of(*stages), list[Tensor]()
    ours = WholeBatchStep(schedule, model, CPU, F.mse_loss, dims)
    found: dict[str, Any] = {"output": ours(x, target=target, losses=losses, **batch), "losses": losses}
    found["gradients"] = gradients()
    evaluation = WholeBatchStep(forward_only(2, M), model, CPU, F.mse_loss, dims)
    found["evaluation"] = evaluation(x, target=target, **batch)
    along = WholeBatchStep(forward_only(2, M), model, CPU, F.mse_loss, dims, output_dim=1)
    found["joined along T"] = along(x, target=target, **batch)

    return found | {"kinds": kinds, "kinds_gradients": kinds_gradients}


@pytest.mark.parametrize("name", ["afab", "1f1b", "zb_h1"])
def test_outputs_losses_and_gradients_equal_one_process(pool: WorkerPool, name: str) -> None:
    first, last = pool.run(steps, 2, name)
    stages, x, target, batch = stages_and_batch()
    y = stages[1](stages[0](x, **batch), **batch)
    losses = torch.stack([F.mse_loss(*each) for each in zip(y.chunk(M), target.chunk(M), strict=True)])
    losses.mean().backward()
    y = y.detach()
    for rank, stage in zip((first, last), stages, strict=True):
        for kind in ("gradients", "kinds_gradients"):
            for gradient, parameter in zip(rank[kind], stage.parameters(), strict=True):
                assert_close(gradient, parameter.grad)
    assert (first["output"], first["losses"], first["kinds"]) == (None, [], [None, None])
    assert_close(torch.stack(last["losses"]), losses.detach())
    assert_close(last["output"], y)
    assert_close(last["evaluation"], y)
    assert_close(last["joined along T"], torch.cat(y.chunk(M), 1))
    for found in last["kinds"]:
        assert_close(found["logits"], y)
        assert_close(found["both"][0], 2 * y)
        assert found["both"][1] is None
        assert_close(found["sum"], torch.stack([part.sum() for part in y.chunk(M)]))
