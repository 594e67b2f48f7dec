"""examples/encoder_decoder.py: losses, gradient norms and weights are those of transformers' T5."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from conformance.worker_pool import WorkerPool
from examples.encoder_decoder import PAD, build_model, cross_entropy, name_in_transformers, run
from picotron.optimizer import AdamW, update_weights
from picotron.process_group_manager import setup_process_group_manager
from tests.support.examples import train_reference
from tests.support.oracle import assert_close, make_config, with_exact_norms
from tests.support.training import CPU
from workbench.pipelines.whole_batch import WholeBatchStep
from workbench.schedules.schedules import build

V, SEQUENCES, MICRO_BATCHES, STEPS = 17, 24, 6, 3
TRAINING = make_config().training


def model_config() -> T5Config:
    """Return the config of a model whose position biases end within the sequences."""
    sizes: dict[str, Any] = {"d_model": 24, "d_kv": 5, "num_heads": 3, "d_ff": 20, "num_layers": 5}
    buckets = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 9}
    keys = sizes | buckets | {"num_decoder_layers": 6, "vocab_size": V, "tie_word_embeddings": True}
    return T5Config(dropout_rate=0.0, decoder_start_token_id=PAD, **keys)


def oracle(config: T5Config) -> T5ForConditionalGeneration:
    """Return transformers' model in float64, with norms that are not 1."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return with_exact_norms(model).eval()


def batch() -> tuple[Tensor, Tensor]:
    """Return sources of 4 to 14 tokens and targets of 13."""
    draw = torch.Generator().manual_seed(1)
    source, target = (torch.randint(1, V, (SEQUENCES, length), generator=draw) for length in (14, 13))
    ends = torch.randint(1, 14, (SEQUENCES, 1), generator=draw)
    source[torch.arange(14) >= 3 + ends.roll(1, 0)] = PAD
    return source, target


def loss_of(model: T5ForConditionalGeneration, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    return model(input_ids=source, attention_mask=(source != PAD).long(), labels=target).loss


def train(name: str, pp: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the losses of all steps, the gradient norms, and this rank's weights at the end."""
    setup_process_group_manager(1, 1, pp, 1)
    config, schedule = model_config(), build(name, pp, MICRO_BATCHES)
    model: Any = build_model(config, schedule, oracle(config).state_dict(), CPU)
    with_exact_norms(model)
    step = WholeBatchStep(schedule, model, CPU, cross_entropy)
    optimizer, losses, norms = AdamW(model, TRAINING, fused=False), list[float](), list[float]()
    for _ in range(STEPS):
        losses.append(run(step, batch())[0])
        norms.append(update_weights(model, optimizer, TRAINING.max_grad_norm).item())
    stages = model.module.stages
    weights = [each for stage in stages.values() for each in stage.state_dict().items()]
    return losses, norms, {name_in_transformers(name): weight.clone() for name, weight in weights}


@pytest.mark.processes
def test_training_equals_transformers(pool: WorkerPool) -> None:
    model = oracle(model_config())
    records, expected = train_reference(model, TRAINING, STEPS, lambda: {"loss": loss_of(model, batch())})
    seen: dict[str, Tensor] = {}
    for losses, norms, weights in pool.run(train, 2, "zbv", 2):
        assert_close(losses, [record["loss"] for record in records], what="losses")
        assert_close(norms, [record["grad_norm"] for record in records], what="norms")
        for name, weight in weights.items():
            assert torch.equal(weight, seen.setdefault(name, weight)), f"replicas of {name} differ"
    assert_close(seen, expected)
