"""Fine-tuning in every layout: a step and an evaluation equal transformers, which gets one sample at a time."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.oracle import CPU, assert_close, make_config, oracle_model, our_model, tiny_llama
from conformance.training import all_stages, layout_name, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader, split_train_eval
from picotron.data.rows import Rows, Samples
from picotron.pipeline_parallel.plan import plan_pipeline
from picotron.run.metrics import global_mean
from picotron.train_step import make_evaluation

MODEL = tiny_llama(num_hidden_layers=4)
ROWS, EVALUATIONS = 8, 2  # rows of a global batch, and global batches of an evaluation


def samples() -> Samples:
    """Return samples of up to 20 tokens, of which those with more than 17 are cut. Prompts are 0 to 7 tokens long."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 21, 200)
    prompts = np.minimum(generator.integers(0, 8, 200), lengths - 1)
    counted = np.concatenate([np.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)])
    return Samples(generator.integers(61, size=lengths.sum()).astype(np.uint16), counted.astype(np.uint8), lengths)


def config_of(layout: dict[str, Any]) -> Config:
    return make_config(
        **{f"distributed__{key}": value for key, value in layout.items()},
        training__micro_batch_size=2,
        training__gradient_accumulation_steps=4 // layout.get("dp_size", 1),
        training__eval_frequency=1,
        training__eval_steps=EVALUATIONS,
        dataset__prompt_column="prompt",
        dataset__completion_column="completion",
        dataset__shuffle=False,
    )


def rows_of(config: Config) -> tuple[Rows, Rows]:
    return split_train_eval(samples(), config)


def step_and_evaluation(config: Config) -> tuple[float, float, dict[str, Tensor]]:
    model, (training, evaluation) = wrapped(config, MODEL), rows_of(config)
    evaluate = make_evaluation(config, plan_pipeline(config, MODEL), CPU)
    loader = MicroBatchDataLoader(evaluation, config, CPU, batches=EVALUATIONS)
    evaluated = global_mean(evaluate(model, loader)).item()
    loss = global_mean(step_of(config, MODEL)(model, MicroBatchDataLoader(training, config, CPU))).item()
    return loss, evaluated, all_stages(model.module.module, "main_grad")


def mean_loss(model: Any, rows: Rows, count: int) -> Tensor:
    """Compute the mean loss of all counted targets in the first `count` rows, one sample after the other."""
    losses, targets = torch.zeros((), dtype=torch.float64), 0
    for row in (rows[i] for i in range(count)):
        assert row.counted is not None
        assert row.documents is not None
        ids, labels, counted = (torch.from_numpy(each.astype(np.int64)) for each in row[:3])
        for end, length in zip(row.documents.cumsum(), row.documents, strict=True):
            part = slice(end - length, end)
            if counted[part].any():
                log_probs = model(input_ids=ids[None, part], use_cache=False).logits[0].log_softmax(-1)
                losses = losses - (log_probs.gather(-1, labels[part, None])[:, 0] * counted[part]).sum()
                targets += int(counted[part].sum())
    return losses / targets


@functools.cache
def expected() -> tuple[float, float, dict[str, Tensor]]:
    model, (training, evaluation) = oracle_model(MODEL, our_model(MODEL, seed=42).state_dict()), rows_of(config_of({}))
    loss = mean_loss(model, training, ROWS)
    loss.backward()
    with torch.no_grad():
        evaluated = mean_loss(model, evaluation, ROWS * EVALUATIONS)
    return loss.item(), evaluated.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp_size": 2},
        {"tp_size": 2, "sequence_parallel": True},
        {"cp_size": 2},
        {"cp_size": 2, "cp_engine": "ulysses", "cp_sharding": "contiguous"},
        {"pp_size": 2},
        {"pp_size": 2, "pp_engine": "zbv"},
        {"dp_size": 2, "pp_size": 2, "cp_size": 2, "pp_engine": "interleaved_1f1b"},
    ],
    ids=layout_name,
)
def test_loss_gradients_and_evaluation_equal_transformers(pool: WorkerPool, layout: dict[str, Any]) -> None:
    config, (loss, evaluated, gradients) = config_of(layout), expected()
    for result in pool.run(step_and_evaluation, config.distributed.world_size, config):
        assert_close(result[0], loss, what="loss")
        assert_close(result[1], evaluated, what="evaluation")
        for name, gradient in gradients.items():
            assert_close(result[2][name], gradient, what=name)
