"""Pipeline parallelism equals transformers on one process. test_pipeline_order.py checks the order of the actions."""

import functools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig

from conformance.oracle import (
    assert_close,
    assert_equals_training,
    make_config,
    oracle_model,
    oracle_training,
    our_model,
    random_tokens,
    tiny_llama,
)
from conformance.training import CPU, Loader, all_stages, batches, layout_name, stage_of, train
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader, split_train_eval
from picotron.data.rows import Text
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.weights import main_grad
from picotron.pipeline_parallel.pipeline_parallel import (
    train_step_pipeline_1f1b,
    train_step_pipeline_afab,
)
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.train_step import make_evaluation, train_step

LAYERS = {2: 3, 3: 5, 4: 6}  # never the same number of layers on every stage
LAYOUTS: list[dict[str, Any]] = [{"pp_size": p} | more for p in LAYERS for more in ({}, {"dp_size": 2}, {"tp_size": 2})]
LAYOUTS += [{"pp_size": 2, "dp_size": 2, "tp_size": 2}, {"pp_size": 2, "tp_size": 2, "sequence_parallel": True}]
MICRO_BATCHES = (1, 2, 5, 8)
# The pipeline alone under both schedules, and two stages with another axis under one of the schedules, with the other
# parameters in rotation. The fuzzer draws others.
CASES = [
    (engine, layout, MICRO_BATCHES[(i + shift) % 4], (i // 2 + shift) % 2 == 0, ("none", "full")[i // 3 % 2])
    for shift, engine in enumerate(("afab", "1f1b"))
    for i, layout in enumerate(LAYOUTS)
    if layout.keys() == {"pp_size"} or (layout["pp_size"] == 2 and i % 2 == shift)
]


@functools.cache
def expected_training(micro_batches: int, layers: int, tied: bool) -> dict[str, Any]:
    """Train on one process, where only the number of micro-batches per global batch matters."""
    config = make_config(
        training__gradient_accumulation_steps=micro_batches,
        training__total_train_steps=5,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
    )
    model_config = tiny_llama(num_hidden_layers=layers, tie_word_embeddings=tied)
    return oracle_training(config, model_config, random_tokens())


@pytest.mark.parametrize(
    ("engine", "layout", "micro_batches", "tied", "checkpointing"),
    [pytest.param(*case, marks=pytest.mark.slow if len(case[1]) > 2 else []) for case in CASES],
    ids=layout_name,
)
def test_five_steps_equal_one_process(
    pool: WorkerPool, engine: str, layout: dict[str, Any], micro_batches: int, tied: bool, checkpointing: str
) -> None:
    config = make_config(
        **{f"distributed__{key}": value for key, value in layout.items()},
        distributed__pp_engine=engine,
        training__gradient_accumulation_steps=micro_batches,
        training__activation_checkpointing=checkpointing,
        training__total_train_steps=5,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
        dataset__shuffle=False,
    )
    model_config = tiny_llama(num_hidden_layers=LAYERS[layout["pp_size"]], tie_word_embeddings=tied)
    expected = expected_training(layout.get("dp_size", 1) * micro_batches, model_config.num_hidden_layers, tied)
    for result in pool.run(train, config.distributed.world_size, config, model_config):
        assert_equals_training(result, expected)


STEPS = {"afab": train_step_pipeline_afab, "1f1b": train_step_pipeline_1f1b}


def gradients(
    engine: str, config: LlamaConfig, layout: dict[str, int], dtype: torch.dtype, compiled: bool
) -> dict[str, Any]:
    """Return loss and gradients of one step with three micro-batches."""
    stage = stage_of(make_config(**layout), config, dtype)
    if compiled:
        for layer in stage.module.model.layers.values():
            layer.compile(backend="aot_eager")
    model = DataParallelBucket(stage)
    if pgm.process_group_manager.pp_world_size == 1:
        loss = train_step(model, Loader(batches(3)), CPU)
    else:
        loss = STEPS[engine](model, Loader(batches(3)), (2, 16, 32), CPU, dtype).double()
        all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(stage.module, "main_grad")}


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


@pytest.mark.parametrize("layout", [{"pp_size": 3}, {"pp_size": 2, "tp_size": 2}], ids=layout_name)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("engine", STEPS)
def test_loss_and_gradients_equal_transformers(
    pool: WorkerPool, engine: str, tied: bool, layout: dict[str, int]
) -> None:
    model = {
        "num_hidden_layers": 4,
        "tie_word_embeddings": tied,
        "pad_token_id": 3,
        "attention_bias": True,
        "mlp_bias": True,
    }
    expected = expected_step(**model)
    sizes = {f"distributed__{key}": value for key, value in layout.items()}
    for result in pool.run(
        gradients, 2 * len(layout) + (len(layout) == 1), engine, tiny_llama(**model), sizes, torch.float64, False
    ):
        assert_close(result["loss"], expected["loss"], what="loss")
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("engine", STEPS)
def test_stages_equal_one_process_bit_for_bit(pool: WorkerPool, engine: str, dtype: torch.dtype) -> None:
    config = tiny_llama(num_hidden_layers=4)
    (whole,) = pool.run(gradients, 1, engine, config, {}, dtype, False)
    for result in pool.run(gradients, 3, engine, config, {"distributed__pp_size": 3}, dtype, False):
        assert result["loss"].float() == whole["loss"].float()
        for name, gradient in whole["gradients"].items():
            assert torch.equal(result["gradients"][name], gradient), name


@pytest.mark.slow  # `make test` compiles the layers of the executor
def test_compiled_layers_have_the_same_gradients(pool: WorkerPool) -> None:
    config = tiny_llama(num_hidden_layers=4)
    (whole,) = pool.run(gradients, 1, "1f1b", config, {}, torch.float64, False)
    for result in pool.run(gradients, 3, "1f1b", config, {"distributed__pp_size": 3}, torch.float64, True):
        for name, gradient in whole["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


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


def evaluations(config: Config, model_config: LlamaConfig) -> list[float]:
    """Return the global losses of two consecutive evaluations."""
    stage, grid = stage_of(config, model_config), pgm.process_group_manager
    model = DataParallelBucket(stage)
    _, rows = split_train_eval(Text(random_tokens()), config)
    loader = MicroBatchDataLoader(rows, config, CPU, shuffle=False, batches=config.training.eval_steps)
    plan, losses = plan_pipeline(config, model_config), []
    evaluation = make_evaluation(config, plan, CPU)
    for _ in range(2):
        loss = evaluation(model, loader).double()
        assert not loss.requires_grad
        all_reduce(loss, grid.cp_dp_group, dist.ReduceOp.AVG)
        all_reduce(loss, grid.pp_group)
        losses.append(loss.item())
    assert all(main_grad(parameter).count_nonzero() == 0 for parameter in model.parameters())
    return losses


def check_evaluations(pool: WorkerPool, config: Config, model_config: LlamaConfig) -> None:
    """Assert that every evaluation returns transformers' mean loss over the last sequences of the data."""
    sequences = config.held_out_sequences
    stream = torch.from_numpy(random_tokens()[-(16 * sequences + 1) :].astype("int64"))
    model = oracle_model(model_config, our_model(model_config, seed=42).state_dict())
    with torch.no_grad():
        logits = model(input_ids=stream[:-1].view(sequences, 16), use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), stream[1:]).item()
    for losses in pool.run(evaluations, config.distributed.world_size, config, model_config):
        assert_close(losses, [expected, expected])


@pytest.mark.parametrize("layout", [{}, *LAYOUTS[:3], {"pp_size": 3}, *LAYOUTS[-2:]], ids=layout_name)
def test_evaluation_equals_transformers(pool: WorkerPool, layout: dict[str, Any]) -> None:
    config = make_config(
        **{f"distributed__{key}": value for key, value in layout.items()},
        training__gradient_accumulation_steps=4 // layout.get("dp_size", 1),
        training__eval_frequency=1,
        training__eval_steps=3,
    )
    assert config.held_out_sequences == 3 * 2 * 4  # in every layout
    check_evaluations(pool, config, tiny_llama(tie_word_embeddings=True))
