"""Estimates of memory beside what models, optimizers and autograd really hold."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.explain.estimate import Estimate, bubble, rank_memory
from picotron.optimizer import AdamW
from picotron.parallelize import build_model, check_layout
from picotron.pipeline_parallel.pipeline_parallel import hidden_states_shape
from picotron.process_group_manager import setup_process_group_manager
from picotron.schedules.plan import plan_pipeline
from picotron.train_step import make_train_step
from tests.support.oracle import make_config, random_tokens, tiny_llama
from tests.support.worker_pool import WorkerPool

CPU = torch.device("cpu")


class Kept:
    """Counts the bytes that autograd keeps for backward, each storage once, and the most at a time."""

    def __init__(self, not_counted: list[Tensor]) -> None:
        self.not_counted = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
        self.uses: Counter[int] = Counter()
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.not_counted or storage.nbytes() == 0:
            return tensor
        return Held(self, tensor)

    def unpack(self, held: Any) -> Tensor:
        return held.tensor if isinstance(held, Held) else held


class Held:
    """A tensor, until autograd forgets it."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.kept, self.tensor, storage = kept, tensor, tensor.untyped_storage()
        self.pointer, self.bytes = storage.data_ptr(), storage.nbytes()
        kept.now += self.bytes * (kept.uses[self.pointer] == 0)
        kept.uses[self.pointer] += 1
        kept.most = max(kept.most, kept.now)

    def __del__(self) -> None:
        self.kept.uses[self.pointer] -= 1
        self.kept.now -= self.bytes * (self.kept.uses[self.pointer] == 0)


def really(config: Config, model_config: LlamaConfig) -> dict[str, Any]:
    """What this rank holds after a training step, and the most that it held for backward."""
    layout, dtype = config.distributed, getattr(torch, config.model.dtype)
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    plan = plan_pipeline(config, model_config)
    stage = build_model(config, model_config, plan, CPU, dtype)
    model = DataParallelBucket(stage, groups=stage.parameters_by_stage())
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, config.training, fused=True)
    step = make_train_step(config, plan, hidden_states_shape(config, model_config), CPU, dtype)
    kept = Kept(parameters)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        step(model, MicroBatchDataLoader(random_tokens(vocab_size=model_config.vocab_size), config, CPU))
    assert kept.now == 0
    optimizer.step()
    return {
        "rank": pgm.process_group_manager.pp_rank,
        "parameters": sum(p.numel() for p in parameters),
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(bucket.buffer.nbytes for bucket in model.buckets),
        "optimizer": sum(tensor.nbytes for p in parameters for tensor in optimizer.state_of(p).values()),
        "activations": kept.most,
    }


MODEL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 127,
}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # changes of the config and of the model
    ({"model__dtype": "float32"}, {"tie_word_embeddings": True}),
    ({"model__dtype": "bfloat16", "distributed__tp_size": 2}, {"num_key_value_heads": 1}),
    ({"distributed__tp_size": 2, "distributed__sequence_parallel": True}, {"attention_bias": True, "mlp_bias": True}),
    ({"distributed__cp_size": 2, "model__dtype": "bfloat16"}, {}),
    ({"distributed__cp_size": 2, "distributed__cp_engine": "ulysses"}, {}),
    ({"distributed__pp_size": 2, "distributed__pp_engine": "1f1b"}, {"tie_word_embeddings": True}),
    ({"distributed__pp_size": 2, "distributed__pp_engine": "interleaved_1f1b"}, {}),
    ({"training__activation_checkpointing": "full", "distributed__pp_size": 2, "distributed__pp_engine": "afab"}, {}),
    ({"training__activation_checkpointing": "full", "distributed__tp_size": 2, "distributed__sequence_parallel": True}, {}),
    ({"model__use_flash_attention": False, "model__dtype": "bfloat16"}, {}),
]  # fmt: skip
MORE = [
    ({**layout, "model__dtype": dtype}, {})
    for dtype in ("bfloat16", "float32")
    for layout in (
        {},
        {"distributed__tp_size": 2, "distributed__cp_size": 2, "distributed__sequence_parallel": True},
        {"distributed__cp_size": 2, "distributed__cp_engine": "all_gather"},
        {"distributed__cp_size": 2, "distributed__cp_engine": "ulysses", "model__use_flash_attention": False},
        # Not zb_h1 and dualpipev: what W still needs is not in autograd's hands, see `split_backward`.
        *({"distributed__pp_size": 2, "distributed__pp_engine": name} for name in ("afab", "looped_bfs", "zbv")),
        {"distributed__dp_size": 2, "distributed__pp_size": 2, "distributed__pp_layout": "Et|tttL"},
    )
]


@pytest.mark.parametrize(
    ("changes", "model"), [*CASES, *(pytest.param(*case, marks=pytest.mark.parity) for case in MORE)], ids=str
)
def test_what_is_in_memory(pool: WorkerPool, changes: dict[str, Any], model: dict[str, Any]) -> None:
    config = make_config(training__seq_length=64, training__gradient_accumulation_steps=5, **changes)
    model_config = tiny_llama(num_hidden_layers=4, **MODEL | model)
    estimates = rank_memory(config, model_config, check_layout(config, model_config))
    # Checkpoints hide from autograd's hooks what they compute again.
    hidden = Estimate(config, model_config).layer() if config.training.activation_checkpointing == "full" else 0
    for held in pool.run(really, config.distributed.world_size, config, model_config):
        estimate = estimates[held["rank"]]
        for what in ("parameters", "weights", "gradients", "optimizer"):
            assert getattr(estimate, what) == held[what], what
        assert estimate.activations - hidden == pytest.approx(held["activations"], rel=0.02)


def test_bubble() -> None:
    """By the formulas of the papers, as stages take about equally long: the vocabulary is tiny."""
    model_config = tiny_llama(num_hidden_layers=4, vocab_size=3, hidden_size=1024)
    for engine, idle in (("1f1b", 1 / (8 + 1)), ("interleaved_1f1b", 1 / (2 * 8 + 1)), ("afab", 1 / (8 + 1))):
        config = make_config(
            distributed__pp_size=2, distributed__pp_engine=engine, training__gradient_accumulation_steps=8
        )
        assert bubble(config, model_config, check_layout(config, model_config)) == pytest.approx(idle, rel=0.01)
    one = make_config()
    assert bubble(one, model_config, check_layout(one, model_config)) == 0.0


def test_a_gpu_has_fused_norms() -> None:
    """What differs there from what can be counted here: the formula of the docstring, for bfloat16."""
    config = make_config(distributed__use_cpu=False, model__dtype="bfloat16")
    model = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    D, heads, kv, F = 4096, 32 * 128, 8 * 128, 14336
    per_token = 2 * (4 * D + 2 * heads + 2 * kv + 4 * F) + 4 * (2 + 32)
    assert Estimate(config, model).layer() == 2 * 16 * per_token
