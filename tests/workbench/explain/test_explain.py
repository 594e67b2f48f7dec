"""`train.py --explain`: memory and traffic equal those of a real run and of the formulas."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import train
from conformance.models import small_config
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Config
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import loader_of, step_of, wrapped
from workbench.explain.explain import Step, route_evenly, run_stages, run_step
from workbench.explain.fake_group import message
from workbench.pipelines.engine import plan_pipeline

pytestmark = pytest.mark.usefixtures("_no_grid_is_left")

LAYERS, B, T, D = 3, 2, 16, 32  # of tiny_llama and make_config


def explained(config: Config, model_config: LlamaConfig) -> list[Step]:
    return run_stages(config, model_config, plan_pipeline(config, model_config))


# -------------------------------------------------------------------------------------------- comparison with real runs


NAMES = {
    "allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all", "send": "send", "recv_": "receive",
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Counter of all torch.distributed operations, whichever code calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = NAMES[function._schema.name.removeprefix("c10d::")]
            group = dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
            self.messages[message(name, args, group, sys._getframe(1))] += 1
        return function(*args, **(kwargs or {}))


def really(config: Config, model_config: LlamaConfig) -> tuple[int, Step]:
    """Run one real step. Returns the pp rank of this process and its step."""
    model = wrapped(config, model_config)
    route_evenly(model)
    loader = loader_of(config)
    with Watch() as watch:
        step = run_step(model, loader, config, step_of(config, model_config))
    return pgm.process_group_manager.pp_rank, step._replace(messages=watch.messages)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("pp2 tp2 sp full", {"tie_word_embeddings": True}),
        ("cp2 pp2 zb_h1", {}),
        ("tp2 pp2 dualpipev", {"num_hidden_layers": 4}),  # of whose backwards some are split
        ("dp2 cp2 ulysses contiguous", {}),
        # two ranks hold a key/value head, and the loss has two chunks
        ("tp4 full", {"max_position_embeddings": 300}),
        ("pp4", {"num_hidden_layers": 6}),  # of which those in the middle are played once
        ("dp2 cp2 ep4", {"family": "qwen3_moe"}),
        # the pp ranks differ only in the layers that have experts
        (
            "dp2 pp2 ep2",
            {"family": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 1]},
        ),
        ("dp4 ep2 zero1", {"family": "olmoe"}),
        pytest.param("dp2 tp2 ep2", {"family": "dots1"}, marks=pytest.mark.slow),
        ("dp2 ep2 tp2 sp", {"family": "olmoe"}),
    ],
)
def test_explain_equals_a_real_run(pool: WorkerPool, layout: str, model: dict[str, Any]) -> None:
    """Also with more micro-batches than are played."""
    config = make_config(f"{layout} m5", training__seq_length=model.get("max_position_embeddings", T))
    model_config = tiny_llama(**model)
    expected = explained(config, model_config)
    for pp_rank, step in pool.run(really, 4, config, model_config):
        assert step == expected[pp_rank]


# ------------------------------------------------------------------------------------------------------------- formulas


def total(step: Step, axis: str, value: Any = lambda each: 1, **fields: Any) -> int:
    """Sum a value over the messages on an axis that have these fields."""
    return sum(
        value(each) * times
        for each, times in step.messages.items()
        if each.axis == axis and all(getattr(each, name) == field for name, field in fields.items())
    )


def test_all_to_alls_send_each_row_four_times() -> None:
    """docs/expert_parallel.md: 8 k N D bytes per layer and micro-batch in bfloat16, for large ep."""
    model_config = small_config("qwen3_moe")
    (step,) = explained(make_config("dp2 cp2 ep4 m3 bfloat16"), model_config)
    expected = LAYERS * 3 * 8 * model_config.num_experts_per_tok * (B * T // 2) * D * 3 // 4
    assert total(step, "ep", lambda each: each.sent, dtype=torch.bfloat16) == expected


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 18), ("float16", 18), ("float32", 16)])
def test_a_parameter_takes_the_bytes_of_its_dtype(dtype: str, size: int) -> None:
    (step,) = explained(make_config(dtype), tiny_llama())
    assert step.weights + step.gradients + step.optimizer == size * step.parameters


# --------------------------------------------------------------------------------------------------------- command line


def test_explain_prints_a_layout_of_4096_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This runs on one process, without GPUs or data, and writes nothing."""
    monkeypatch.setattr(train, "set_up_logging", lambda: None)
    sizes = {"dp": 64, "pp": 4, "cp": 2, "tp": 8}
    layout = [word for axis, size in sizes.items() for word in (f"--distributed.{axis}_size", str(size))]
    more = ["--distributed.use_cpu", "false", "--dataset.name", "nowhere", "--checkpoint.save_dir", "/nowhere"]
    more += ["--distributed.pp_engine", "afab", "--model.num_key_value_heads", "4", "--training.compile", "true"]
    monkeypatch.setattr(sys, "argv", ["train.py", "--explain", "--config", "template/base_config.json", *layout, *more])
    train.main()
    rows = {tuple(line.split()) for line in capsys.readouterr().out.splitlines()}
    (found,) = (row for row in rows if row[1:] and row[1] == "RowParallelLinear.forward")
    assert found[2:] == ("tp", "8", "all-reduce", "float32", "2", "x", "128", "x", "128", "128", "KiB", "8", "8", "8")
    within = [row for row in rows if "within" in row and "tp" in row]
    assert {row[4] for row in within if row[1] == "sum_partial_gradients"} == {"2"}  # two ranks share a key/value head
