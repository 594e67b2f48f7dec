"""A step on a whole batch, with the calls of torch.distributed.pipelining, equals that of one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallelBucket
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


class LastStage(Stage):
    """A last stage with outputs of several kinds, as models of Hugging Face have."""

    def forward(self, x: Tensor, **others: Tensor) -> Any:
        y = super().forward(x, **others)
        return {"logits": y, "both": (y * 2, None), "sum": y.sum()}


def stages_and_batch() -> tuple[list[Stage], Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    stages = [Stage(), LastStage()]
    T, B = 5, 2 * M
    x, target = torch.randn(2, B, T, D, dtype=torch.float64)
    batch = {"mask": torch.rand(T, T).tril(), "scale": torch.rand(T, B), "gain": torch.rand(B)}
    return stages, x, target, {name: each.double() for name, each in batch.items()}


def loss(y: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(y["logits"], target)


def steps() -> dict[str, Any]:
    """Run a step and evaluations. Returns outputs and losses."""
    rank = setup_process_group_manager(1, 1, 2, 1).pp_rank
    stages, x, target, batch = stages_and_batch()
    schedule, dims, losses = build("1f1b", 2, M), {"scale": 1, "mask": None}, []
    receives = torch.empty_like(x[:2], device="meta")
    model = DataParallelBucket(Pipeline(dict(enumerate(stages)), lambda *_: receives, schedule))
    step = WholeBatchStep(schedule, model, CPU, loss, dims)
    with pytest.raises(UserError, match="should be a list"):
        step(x, target=target, losses=(), **batch)
    with pytest.raises(UserError, match="'scale' has 5 elements in dimension 0, which cannot be divided into 3"):
        WholeBatchStep(schedule, model, CPU, None, {"mask": None})(x, **batch)
    for name in ("inputs", "stage"):
        with pytest.raises(UserError, match=f"an argument '{name}'"):
            step(x, target=target, **batch, **{name: None})
    outputs = [step(x, target=target, losses=losses, **batch)]
    backwards = []
    for parameter in stages[rank].parameters():
        parameter.register_hook(backwards.append)
    outputs.append(WholeBatchStep(schedule, model, CPU, None, dims)(x, **batch))
    assert not backwards
    outputs.append(WholeBatchStep(forward_only(2, M), model, CPU, loss, dims)(x, target=target, **batch))
    along = WholeBatchStep(schedule, model, CPU, None, dims, output_dim=1)(x, **batch)
    return {"outputs": outputs, "losses": losses, "joined along T": along}


def test_outputs_and_losses_equal_one_process(pool: WorkerPool) -> None:
    """Gradients are compared in test_encoder_decoder."""
    first, last = pool.run(steps, 2)
    stages, x, target, batch = stages_and_batch()
    y = stages[1](stages[0](x, **batch), **batch)["logits"].detach()
    losses = torch.stack([F.mse_loss(*each) for each in zip(y.chunk(M), target.chunk(M), strict=True)])
    assert (first["outputs"], first["losses"]) == ([None] * 3, [])
    assert_close(torch.stack(last["losses"]), losses)
    assert_close(last["joined along T"]["logits"], torch.cat(y.chunk(M), 1))
    for found in last["outputs"]:
        assert_close(found["logits"], y)
        assert_close(found["both"][0], 2 * y)
        assert found["both"][1] is None
        assert_close(found["sum"], torch.stack([part.sum() for part in y.chunk(M)]))
