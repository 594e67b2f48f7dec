"""Pipeline parallelism equals one process running transformers, and each schedule is what its paper draws."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import Llama
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.weights import initial_value, materialise
from tests.oracle import assert_close, make_config, oracle_training, our_model, random_tokens, tiny_llama
from tests.test_data_parallel import train_steps
from tests.test_tensor_parallel import gathered
from tests.worker_pool import WorkerPool

CPU = torch.device("cpu")


def stage_of(config: LlamaConfig, layout: Any, checkpointed: bool = False, deallocate: bool = True) -> PipelineParallel:
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    with torch.device("meta"):
        llama = Llama(config, checkpoint_activations=checkpointed).to(torch.float64)
        llama = apply_tensor_parallel(llama, layout.sequence_parallel)
        stage = PipelineParallel(llama, seq_length=16, deallocate_outputs=deallocate)
    materialise(llama, CPU, initial_value(config, 42))
    return stage


def all_stages(model: nn.Module, attribute: str) -> dict[str, Tensor]:
    """The parameters (`data`) or gradients (`main_grad`) of the whole model by name."""
    grid = pgm.process_group_manager
    parts: list[dict[str, Tensor]] = [{} for _ in range(grid.pp_world_size)]
    dist.all_gather_object(parts, gathered(model, attribute), group=grid.pp_group)
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(tensor, whole.setdefault(name, tensor)), f"the copies of {name} differ"
    return whole


def train(config: Config, model_config: LlamaConfig) -> dict[str, Any]:
    stage = stage_of(model_config, config.distributed, config.training.activation_checkpointing == "full")
    model = DataParallelBucket(stage)
    losses, norms = train_steps(model, config, model_config)
    return {"losses": losses, "grad_norms": norms, "weights": all_stages(stage.module, "data")}


LAYERS = {2: 3, 3: 5, 4: 6}  # never the same number for every stage
LAYOUTS: list[dict[str, Any]] = [{"pp_size": p} | more for p in LAYERS for more in ({}, {"dp_size": 2}, {"tp_size": 2})]
LAYOUTS += [{"pp_size": 2, "dp_size": 2, "tp_size": 2}, {"pp_size": 2, "tp_size": 2, "sequence_parallel": True}]
MICRO_BATCHES = (1, 2, 5, 8)
# Of everything with everything, `make test` has some: each layout and schedule, the rest in turn. `make parity` has all.
EVERYTHING = list(itertools.product(("afab", "1f1b"), LAYOUTS, MICRO_BATCHES, (False, True), ("none", "full")))
SOME = [
    (engine, layout, MICRO_BATCHES[(i + shift) % 4], (i // 2 + shift) % 2 == 0, ("none", "full")[i // 3 % 2])
    for shift, engine in enumerate(("afab", "1f1b"))
    for i, layout in enumerate(LAYOUTS)
]


def layout_name(value: Any) -> str | None:
    return " ".join(f"{k.removesuffix('_size')}{v}" for k, v in value.items()) if isinstance(value, dict) else None


@functools.cache
def expected_training(micro_batches: int, layers: int, tied: bool) -> dict[str, Any]:
    """One process, for which only the number of micro-batches in a global batch matters."""
    config = make_config(
        training__gradient_accumulation_steps=micro_batches,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
    )
    model_config = tiny_llama(num_hidden_layers=layers, tie_word_embeddings=tied)
    return oracle_training(config, model_config, random_tokens())


@pytest.mark.parametrize(
    ("engine", "layout", "micro_batches", "tied", "checkpointing"),
    [pytest.param(*case, marks=[] if case in SOME else pytest.mark.parity) for case in EVERYTHING],
    ids=layout_name,
)
def test_ten_steps_equal_one_process(
    pool: WorkerPool, engine: str, layout: dict[str, Any], micro_batches: int, tied: bool, checkpointing: str
) -> None:
    config = make_config(
        **{f"distributed__{key}": value for key, value in layout.items()},
        distributed__pp_engine=engine,
        training__gradient_accumulation_steps=micro_batches,
        training__activation_checkpointing=checkpointing,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
        dataset__shuffle=False,
    )
    model_config = tiny_llama(num_hidden_layers=LAYERS[layout["pp_size"]], tie_word_embeddings=tied)
    expected = expected_training(layout.get("dp_size", 1) * micro_batches, model_config.num_hidden_layers, tied)
    for result in pool.run(train, config.distributed.world_size, config, model_config):
        assert_close(result["losses"], expected["losses"], what="losses")
        assert_close(result["grad_norms"], expected["grad_norms"], what="grad norms")
        assert result["weights"].keys() == dict(our_model(model_config).named_parameters()).keys()
        for key, weight in result["weights"].items():
            assert_close(weight, expected["weights"][key], what=key)
