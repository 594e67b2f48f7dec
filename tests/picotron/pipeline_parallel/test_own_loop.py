"""A 1F1B loop of a user, with the names and signatures of Hugging Face's picotron, runs with our model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.oracle import assert_close, oracle_model, our_model, tiny_llama
from conformance.training import CPU, Loader, all_stages, batches, layout_name, pipeline_config, plan_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.pipeline_parallel.pp_communications import bidirectional_pipeline_communicate, pipeline_communicate

MODEL = {"num_hidden_layers": 4, "tie_word_embeddings": True}


def expected_step() -> tuple[Tensor, dict[str, Any]]:
    """Return transformers' mean loss of three micro-batches, and its gradients."""
    config = tiny_llama(**MODEL)
    model = oracle_model(config, our_model(config, seed=42).state_dict())
    losses = [
        F.cross_entropy(model(input_ids=each["input_ids"]).logits.flatten(0, 1), each["target_ids"].flatten())
        for each in batches(3)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def own_1f1b(model: Any, data_loader: Any, tensor_shapes: Any, device: torch.device, dtype: torch.dtype) -> float:
    grid, micro_batches, total = pgm.process_group_manager, data_loader.grad_acc_steps, 0.0
    ahead = min(grid.pp_world_size - grid.pp_rank - 1, micro_batches)
    synchronises = grid.cp_dp_world_size > 1
    message = {"device": device, "dtype": dtype}
    waiting: list[tuple[Tensor | None, Tensor]] = []

    def forward(input_tensor: Tensor | None) -> Tensor:
        nonlocal total
        batch = next(data_loader)
        y: Tensor = model.forward(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], hidden_states=input_tensor
        )
        if grid.pp_is_last_stage:
            y = F.cross_entropy(y.transpose(1, 2), batch["target_ids"], reduction="mean") / micro_batches
            total += y.item()
        waiting.append((input_tensor, y))
        return y

    for _ in range(ahead):
        x = pipeline_communicate(operation="recv_forward", shapes=tensor_shapes, **message)
        pipeline_communicate(operation="send_forward", tensor=forward(x), **message)
    if ahead < micro_batches:
        x = pipeline_communicate(operation="recv_forward", shapes=tensor_shapes, **message)
    if synchronises:
        model.require_backward_grad_sync = False
    for i in range(micro_batches - ahead):
        is_last = i == micro_batches - ahead - 1
        dy = bidirectional_pipeline_communicate(
            operation="send_fwd_recv_bwd", send_tensor=forward(x), recv_shapes=tensor_shapes, **message
        )
        if synchronises and ahead == 0 and is_last:
            model.require_backward_grad_sync = True
        dx = model.backward(*waiting.pop(0), dy)
        if is_last:
            pipeline_communicate(operation="send_backward", tensor=dx, **message)
        else:
            x = bidirectional_pipeline_communicate(
                operation="send_bwd_recv_fwd", send_tensor=dx, recv_shapes=tensor_shapes, **message
            )
    for i in range(ahead):
        if synchronises:
            model.require_backward_grad_sync = i == ahead - 1
        dy = pipeline_communicate(operation="recv_backward", shapes=tensor_shapes, **message)
        dx = model.backward(*waiting.pop(0), dy)
        pipeline_communicate(operation="send_backward", tensor=dx, **message)
    model.finish_grad_sync()
    return total


def one_step(layout: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    config, model_config = pipeline_config("1f1b", **layout), tiny_llama(**MODEL)
    model = wrapped(config, model_config, torch.float64, plan_of)
    shape = 2, 16, model_config.hidden_size
    loss = torch.tensor(own_1f1b(model, Loader(batches(3)), shape, CPU, torch.float64), dtype=torch.float64)
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return loss, all_stages(model.module.module, "main_grad")


@pytest.mark.parametrize("layout", [{"pp": 3}, {"pp": 2, "dp_size": 2}], ids=layout_name)
def test_gradients_equal_transformers(pool: WorkerPool, layout: dict[str, int]) -> None:
    (expected_loss, expected), processes = expected_step(), layout["pp"] * layout.get("dp_size", 1)
    for loss, gradients in pool.run(one_step, processes, layout):
        assert_close(loss, expected_loss, what="loss")
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_close(gradients[name], gradient, what=name)
