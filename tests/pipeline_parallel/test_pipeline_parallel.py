"""The loops of pipeline parallelism equal transformers on one process. test_pipeline_order.py checks their order."""

import functools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from conformance.oracle import (
    assert_close,
    make_config,
    oracle_model,
    our_model,
    tiny_llama,
)
from conformance.training import CPU, Loader, all_stages, batches, pipeline_config, stage_of, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.pipeline_parallel.pipeline_parallel import (
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.train_step import train_step

STEPS = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}


class CountsGraphs:
    """A model that counts the graphs of earlier forwards that are still in memory when a forward begins."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.counts: list[int] = []

    def __call__(self, **batch: Any) -> torch.Tensor:
        self.counts.append(len(self.graphs))
        loss = torch.ones((), requires_grad=True) * 1.0

        def hook(_: torch.Tensor) -> None:
            pass

        loss.register_hook(hook)  # the graph has the only reference
        self.graphs.add(hook)
        return loss

    def finish_grad_sync(self) -> None:
        pass


def test_step_frees_the_graph_of_a_micro_batch_before_the_next_forward() -> None:
    model: Any = CountsGraphs()
    train_step(model, Loader(batches(3)), CPU)  # type: ignore[arg-type]
    assert model.counts == [0, 0, 0]


@functools.cache
def expected_step(**changes: Any) -> dict[str, Any]:
    """Return transformers' loss of three micro-batches and its gradients of all parameters."""
    config = tiny_llama(**changes)
    model = oracle_model(config, our_model(config, seed=42).state_dict())
    loss = torch.zeros(())
    for batch in batches(3):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = loss + F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten()) / 3
    loss.backward()
    return {"loss": loss.detach(), "gradients": {name: p.grad for name, p in model.named_parameters()}}


def one_step(config: Config, model_config: LlamaConfig, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    """Return the loss and the gradients of the full model after one step."""
    model = wrapped(config, model_config, dtype)
    if compiled:
        for layer in model.module.module.model.layers.values():
            layer.compile(backend="aot_eager")
    items = batches(config.training.gradient_accumulation_steps)
    loss = step_of(config, model_config, dtype)(model, Loader(items)).double()
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(model.module.module, "main_grad")}


def check_step(pool: WorkerPool, config: Config, compiled: bool = False, **changes: Any) -> None:
    expected = expected_step(**changes)
    arguments = (config, tiny_llama(**changes), torch.float64, compiled)
    for result in pool.run(one_step, config.distributed.world_size, *arguments):
        assert_close(result["loss"], expected["loss"], what="loss")
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


@pytest.mark.parametrize(("engine", "tied", "layout"), [("1f1b", tied, {"pp_size": 3}) for tied in (False, True)])
def test_loss_and_gradients_equal_transformers(
    pool: WorkerPool, engine: str, tied: bool, layout: dict[str, int]
) -> None:
    model = {"num_hidden_layers": 4, "tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
    check_step(pool, pipeline_config(engine, layout["pp_size"]), **model)


def test_stage_has_its_own_parameters_only(pool: WorkerPool) -> None:
    for tied in (False, True):
        names = pool.run(parameter_names, 3, tiny_llama(num_hidden_layers=4, tie_word_embeddings=tied))
        layers = [sorted({name.split(".")[2] for name in stage if ".layers." in name}) for stage in names]
        assert layers == [["0"], ["1", "2"], ["3"]]
        others = [[name for name in stage if ".layers." not in name] for stage in names]
        last = ["model.norm.weight", "lm_head.weight"]
        assert others == [
            ["model.embed_tokens.weight"],
            [],
            ["model.embed_tokens.weight", "model.norm.weight"] if tied else last,
        ]


def parameter_names(config: LlamaConfig) -> list[str]:
    stage = stage_of(make_config(distributed__pp_size=3), config)
    assert not any(parameter.is_meta for parameter in stage.parameters())
    return [name for name, _ in stage.module.named_parameters()]


def parameters_of_one_stage(config: LlamaConfig) -> tuple[list[int], list[int]]:
    stage = stage_of(make_config(), config)
    (only,) = stage.parameters_by_stage().values()
    return [id(p) for p in only], [id(p) for p in stage.parameters()]


def test_tied_weight_is_reduced_once(pool: WorkerPool) -> None:
    """Embedding and head are in the same stage here."""
    ((only, known),) = pool.run(parameters_of_one_stage, 1, tiny_llama(tie_word_embeddings=True))
    assert sorted(only) == sorted(known)
