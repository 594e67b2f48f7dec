"""Estimates of memory, checked against the bytes that models, optimizers and autograd hold."""

from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from transformers import LlamaConfig

from conformance.models import small_config
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.model.cross_entropy import LinearCrossEntropy
from tests.support.memory import LiveBytes, SavedBytes
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import dtype_of, loader_of, step_of, wrapped
from workbench.explain.explain import bytes_held, route_evenly
from workbench.pipelines.engine import check_layout
from workbench.pipelines.memory import rank_memory
from workbench.variants.choose import make_optimizer


class CountedPair(tuple):
    """A pair of tensors with an attribute, which exists as long as the pair."""

    counters: list[Any]


def count_gradients_of_loss(saved: SavedBytes) -> Any:
    """Let `saved` count what the loss keeps from forward to backward without autograd, which the hooks do not see."""
    forward = LinearCrossEntropy.forward

    def forward_and_count(ctx: Any, *arguments: Any) -> Tensor:
        loss = forward(ctx, *arguments)
        ctx.gradients = CountedPair(ctx.gradients)
        ctx.gradients.counters = [saved.pack(tensor) for tensor in ctx.gradients]
        saved.peak = max(saved.peak, saved.current)
        return loss

    return mock.patch.object(LinearCrossEntropy, "forward", staticmethod(forward_and_count))


def measure_rank(config: Config, model_config: LlamaConfig) -> dict[str, Any]:
    """Run a training step. Returns the bytes that this rank holds afterwards, and the peak of its activations."""
    model = wrapped(config, model_config)
    route_evenly(model)
    parameters = list(model.parameters())
    optimizer, step = make_optimizer(model, config), step_of(config, model_config)
    saved = SavedBytes(model)
    with saved.hooks(), count_gradients_of_loss(saved):
        step(model, loader_of(config, vocab_size=model_config.vocab_size))
    assert saved.current == 0
    optimizer.step()
    weights, gradients = bytes_held(model)
    return {
        "rank": pgm.process_group_manager.pp_rank,
        "parameters": weights // dtype_of(config).itemsize,
        "weights": weights,
        "gradients": gradients,
        "optimizer": sum(tensor.nbytes for p in parameters for tensor in optimizer.state_of(p).values()),
        "activations": saved.peak,
    }


MODEL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 127,
}
CASES = [  # a layout (a pipeline has several micro-batches in flight), and changes of the model and of the config
    ("float32", {"tie_word_embeddings": True}, {}),
    ("tp2 sp", {"attention_bias": True, "mlp_bias": True}, {}),
    ("cp2 ulysses", {"family": "qwen2"}, {}),
    ("tp2 bfloat16", {"family": "qwen3", "num_key_value_heads": 1}, {"training__optimizer_states": "bfloat16_moments"}),
    ("pp2 1f1b m5", {"tie_word_embeddings": True}, {}),
    ("full pp2 m5", {}, {"schedule__pp_keep_activations": 1}),
    ("selective pp2 zbv m5", {}, {}),
    ("bfloat16", {}, {"model__use_flash_attention": False}),
    ("dp2 zero3 bfloat16", {}, {}),
    ("dp2 zero1 bfloat16", {}, {"training__optimizer_states": "bfloat16"}),
    ("dp2 ep2 bfloat16", {"family": "mixtral"}, {}),
    ("dp4 ep2 zero3", {"family": "qwen3_moe"}, {}),
    ("dp4 ep2 zero1 bfloat16", {"family": "qwen3_moe"}, {}),
    ("tp2 sp selective", {"family": "olmoe"}, {}),
    ("full", {"family": "olmoe"}, {}),
    ("dp2 ep2 bfloat16", {"family": "dots1"}, {}),
    ("tp2 selective", {"family": "dots1", "first_k_dense_replace": 0}, {}),
    ("pp2 zbv m5", {"family": "mixtral"}, {}),
    ("pp2 dp2 ep2 1f1b m5", {"family": "qwen3_moe", "decoder_sparse_step": 2}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "model", "changes"), CASES, ids=str)
def test_estimated_memory_matches_measured_bytes(
    pool: WorkerPool, layout: str, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = make_config(layout, training__seq_length=64, **changes)
    model_config = tiny_llama(num_hidden_layers=4, **MODEL | model)
    estimates = rank_memory(config, model_config, check_layout(config, model_config))
    for measured in pool.run(measure_rank, config.distributed.world_size, config, model_config):
        estimate = estimates[measured["rank"]]
        padding = 0.001 if config.distributed.dp_engine.startswith("zero") or model_config.model_type == "dots1" else 0
        for field in ("parameters", "weights", "gradients", "optimizer"):
            assert getattr(estimate, field) == pytest.approx(measured[field], rel=padding, abs=0), field
        assert estimate.activations == pytest.approx(measured["activations"], rel=0.02)


def peak_of_step(config: Config, model_config: LlamaConfig) -> int:
    """Return the smallest peak of some steps: gloo's threads may release the buffers of a collective a little late."""
    model = wrapped(config, model_config)
    route_evenly(model)
    step = step_of(config, model_config)
    loader, peaks = loader_of(config, vocab_size=model_config.vocab_size), []
    for _ in range(config.distributed.world_size**2):
        with LiveBytes([*model.parameters(), *model.gradient_buffers()]) as live:
            step(model, loader)
        peaks.append(live.peak)
        model.zero_grad()
    return min(peaks)


@pytest.mark.parametrize("kind", ["", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", ""), ("mixtral", ""), ("olmoe", ""), pytest.param("olmoe", "dp2 ep2", marks=pytest.mark.slow)],
)
def test_estimated_peak_matches_all_tensors_of_a_step(pool: WorkerPool, family: str, layout: str, kind: str) -> None:
    config = make_config(f"{layout} float32 {kind}", training__seq_length=512)
    model = small_config(
        family, **MODEL | {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
    )
    (estimate,) = rank_memory(config, model, check_layout(config, model))
    for peak in pool.run(peak_of_step, config.distributed.world_size, config, model):
        assert estimate.activations + estimate.temporary == pytest.approx(peak, rel=0.06)


MEASURED = {  # GB that torch has allocated on an H100 at the peak of a step, see docs/reference/gpu.md
    ("", True): 48.57,
    ("selective", True): 43.73,
    ("full", True): 33.24,
    ("", False): 52.32,
    ("selective", False): 44.26,
    ("full", False): 33.77,
}


@pytest.mark.parametrize(("kind", "compiled"), MEASURED)
def test_estimated_memory_is_that_of_a_gpu(kind: str, compiled: bool) -> None:
    keys = {"training__seq_length": 2048, "training__micro_batch_size": 4, "training__compile": compiled}
    config = make_config(f"bfloat16 {kind}", use_cpu=False, **keys)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "vocab_size": 49152}
    model = LlamaConfig(**sizes, num_attention_heads=32, max_position_embeddings=2048, tie_word_embeddings=True)
    (memory,) = rank_memory(config, model, check_layout(config, model))
    assert memory.total / 1e9 == pytest.approx(MEASURED[kind, compiled], rel=0.003)
