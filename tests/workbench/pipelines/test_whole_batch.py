"""A step on a whole batch equals that of torch.distributed.pipelining on the same stages."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

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
    """Run steps of ours, also one whose outputs are of several kinds, and one of torch's. Returns outputs, losses and
    gradients.
    """
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

    stage = stages_and_batch()[0][rank]
    specs = {"mask": _Replicate(), "scale": TensorChunkSpec(1), "gain": TensorChunkSpec(0)}
    gpipe = ScheduleGPipe(PipelineStage(stage, rank, 2, CPU), M, F.mse_loss, kwargs_chunk_spec=specs)
    theirs: list[Tensor] = []
    output = gpipe.step(*([x] if rank == 0 else []), target=target, losses=theirs, **batch)
    right = {"output": output, "losses": theirs, "gradients": [p.grad for p in stage.parameters()]}
    return {"found": found, "right": right, "kinds": kinds, "kinds_gradients": kinds_gradients}


@pytest.mark.parametrize("name", ["afab", "1f1b", "zb_h1"])
def test_outputs_losses_and_gradients_equal_torch(pool: WorkerPool, name: str) -> None:
    first, last = pool.run(steps, 2, name)
    assert first["found"]["output"] is None
    assert first["found"]["losses"] == []
    for rank in (first, last):
        for found in (rank["found"]["gradients"], rank["kinds_gradients"]):
            for gradient, right in zip(found, rank["right"]["gradients"], strict=True):
                assert_close(gradient, right)
    assert_close(torch.stack(last["found"]["losses"]), torch.stack(last["right"]["losses"]).detach())
    assert_close(last["found"]["output"], last["right"]["output"])
    assert_close(last["found"]["evaluation"], last["right"]["output"])
    assert_close(last["found"]["joined along T"], torch.cat(last["right"]["output"].chunk(M), 1))
    assert first["kinds"] == [None, None]
    y = last["right"]["output"].detach()
    for found in last["kinds"]:
        assert_close(found["logits"], y)
        assert_close(found["both"][0], 2 * y)
        assert found["both"][1] is None
        assert_close(found["sum"], torch.stack([part.sum() for part in y.chunk(M)]))
