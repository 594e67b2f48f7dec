"""A 1F1B loop of a user, with the names, calls and flags of Hugging Face's picotron, trains our model as one process
does: it neither divides the loss by the number of micro-batches nor calls finish_grad_sync, it sets
require_backward_grad_sync to True on the last stage in any case, and to False only if there are replicas.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.optimizer import clip_grad_norm
from picotron.pipeline_parallel.pp_communications import bidirectional_pipeline_communicate, pipeline_communicate
from tests.support.examples import train_reference
from tests.support.oracle import assert_close, oracle_model, our_model, tiny_llama
from tests.support.training import CPU, Loader, all_stages, batches, pipeline_config, wrapped
from workbench.variants.choose import make_optimizer

MODEL = {"num_hidden_layers": 4, "tie_word_embeddings": True}
M, STEPS = 3, 3


def own_1f1b(model: Any, data_loader: Any, tensor_shapes: Any, device: torch.device, dtype: torch.dtype) -> float:
    grid, micro_batches, total = pgm.process_group_manager, data_loader.grad_acc_steps, 0.0
    ahead = min(grid.pp_world_size - grid.pp_rank - 1, micro_batches)
    has_replicas = grid.cp_dp_world_size > 1
    message = {"device": device, "dtype": dtype}
    waiting: list[tuple[Tensor | None, Tensor]] = []

    def forward(input_tensor: Tensor | None) -> Tensor:
        nonlocal total
        batch = next(data_loader)
        y: Tensor = model.forward(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], hidden_states=input_tensor
        )
        if grid.pp_is_last_stage:
            y = F.cross_entropy(y.transpose(1, 2), batch["target_ids"], reduction="mean")
            total += y.item() / micro_batches
        return y

    for _ in range(ahead):
        x = pipeline_communicate(operation="recv_forward", shapes=tensor_shapes, **message)
        y = forward(x)
        pipeline_communicate(operation="send_forward", tensor=y, **message)
        waiting.append((x, y))
    if ahead < micro_batches:
        x = pipeline_communicate(operation="recv_forward", shapes=tensor_shapes, **message)
    if has_replicas:
        model.require_backward_grad_sync = False
    for i in range(micro_batches - ahead):
        is_last = i == micro_batches - ahead - 1
        y = forward(x)
        dy = bidirectional_pipeline_communicate(
            operation="send_fwd_recv_bwd", send_tensor=y, recv_shapes=tensor_shapes, **message
        )
        waiting.append((x, y))
        if ahead == 0 and is_last:
            model.require_backward_grad_sync = True
        dx = model.backward(*waiting.pop(0), dy)
        if is_last:
            pipeline_communicate(operation="send_backward", tensor=dx, **message)
        else:
            x = bidirectional_pipeline_communicate(
                operation="send_bwd_recv_fwd", send_tensor=dx, recv_shapes=tensor_shapes, **message
            )
    for i in range(ahead):
        if has_replicas:
            model.require_backward_grad_sync = i == ahead - 1
        dy = pipeline_communicate(operation="recv_backward", shapes=tensor_shapes, **message)
        dx = model.backward(*waiting.pop(0), dy)
        pipeline_communicate(operation="send_backward", tensor=dx, **message)
    return total


def data_of(step: int, dp_rank: int) -> list[dict[str, Any]]:
    """Return a step's micro-batches, which differ on each dp rank."""
    tokens = ("input_ids", "target_ids")
    return [each | {name: (each[name] + step + 7 * dp_rank) % 61 for name in tokens} for each in batches(M)]


def train(config: Config) -> dict[str, Any]:
    """Train with the loop. Returns losses, gradient norms, and the weights at the end."""
    model_config = tiny_llama(**MODEL)
    model = wrapped(config, model_config, torch.float64, as_train=True)
    optimizer, grid = make_optimizer(model, config), pgm.process_group_manager
    losses, norms = list[float](), list[float]()
    for step in range(STEPS):
        loader = Loader(data_of(step, grid.dp_rank))
        found = own_1f1b(model, loader, (2, 16, model_config.hidden_size), CPU, torch.float64)
        loss = torch.tensor(found, dtype=torch.float64)
        all_reduce(loss, grid.pp_group)
        all_reduce(loss, grid.dp_group, torch.distributed.ReduceOp.AVG)
        losses.append(loss.item())
        norms.append(clip_grad_norm(model, config.training.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": all_stages(model.module.module, "data")}


def train_transformers(config: Config) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train transformers' model on one process, on the data of all ranks. The loss is the sum of the micro-batches."""
    model_config, steps = tiny_llama(**MODEL), itertools.count()
    model = oracle_model(model_config, our_model(model_config, seed=config.training.seed).state_dict())

    def statistics() -> dict[str, Tensor]:
        step = next(steps)
        data = [batch for rank in range(config.distributed.dp_size) for batch in data_of(step, rank)]
        logits = [model(input_ids=each["input_ids"]).logits.transpose(1, 2) for each in data]
        losses = [F.cross_entropy(found, each["target_ids"]) for found, each in zip(logits, data, strict=True)]
        return {"loss": M * torch.stack(losses)}

    return train_reference(model, config.training, STEPS, statistics)


@pytest.mark.parametrize("engine", ["naive", "bucket", "zero1", "zero3"])
@pytest.mark.parametrize(("pp", "dp"), [(3, 1), (2, 2)])
def test_the_loop_equals_transformers(pool: WorkerPool, engine: str, pp: int, dp: int) -> None:
    config = pipeline_config("1f1b", pp, M, dp_size=dp, dp_engine=engine, training__max_grad_norm=0.5)
    records, weights = train_transformers(config)
    for found in pool.run(train, pp * dp, config):
        assert_close(found["losses"], [record["loss"] / M for record in records], what="losses")
        assert_close(found["norms"], [record["grad_norm"] for record in records], what="norms")
        assert_close(found["weights"], weights)
