"""Exercises of docs/*.md: the solutions are correct."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import get_wsd_schedule

from conformance.worker_pool import WorkerPool
from docs.solutions import training_step
from docs.solutions.striped import pairs, striped_positions
from docs.solutions.z_loss import log_z
from picotron.config import Training
from picotron.console import UserError
from picotron.context_parallel.context_parallel import local_positions
from picotron.optimizer import learning_rate_factor
from tests.support.oracle import assert_close, make_config, oracle_model, tiny_llama
from tests.support.training import all_stages, step_of, wrapped
from workbench.own_loops.batches import split_batch, train_batch
from workbench.schedules.actions import AnyAction, parse_action
from workbench.schedules.schedule_csv import read_csv

SOLUTIONS = Path("docs/solutions")

# --------------------------------------------------------------------------------------------------------- solutions


def z_loss() -> dict[str, Tensor]:
    config = make_config("tp2 sp")
    model, batches = wrapped(config, tiny_llama()), split_batch({"input_ids": torch.arange(32).view(2, 16)}, 1)
    step = step_of(config, tiny_llama())
    train_batch(step, model, batches, lambda head, x, batch: log_z(head, x).square().mean())
    return all_stages(model.module.module, "main_grad")


def test_z_loss_equals_one_process(pool: WorkerPool) -> None:
    model = oracle_model(tiny_llama())
    model(input_ids=torch.arange(32).view(2, 16), use_cache=False).logits.logsumexp(-1).square().mean().backward()
    for gradients in pool.run(z_loss, 2):
        for name, parameter in model.named_parameters():
            assert_close(gradients[name], parameter.grad, what=name)


def actions_by_rank(name: str) -> list[Counter[AnyAction]]:
    lines = (SOLUTIONS / f"{name}.csv").read_text().splitlines()
    return [Counter(map(parse_action, line.split(","))) for line in lines]


def test_deadlock_is_fixed_with_the_same_actions() -> None:
    with pytest.raises(UserError, match="deadlock"):
        read_csv(SOLUTIONS / "deadlock.csv")
    read_csv(SOLUTIONS / "no_deadlock.csv")
    assert actions_by_rank("deadlock") == actions_by_rank("no_deadlock")


def test_stripes_are_nearly_balanced() -> None:
    work = [pairs(striped_positions(64, 4, rank)) for rank in range(4)]
    contiguous = [pairs(local_positions(64, 4, rank, "contiguous")) for rank in range(4)]
    assert sum(work) == sum(contiguous) == 64 * 65 // 2
    assert 1 < max(work) * 4 / sum(work) < 1.12 < max(contiguous) * 4 / sum(work)


def test_wsd_with_a_root_equals_that_of_transformers() -> None:
    training = Training(total_train_steps=100, warmup_steps=10, min_lr_ratio=0.1, lr_scheduler="wsd", decay_steps=20)
    factor, linear = training_step.wsd_sqrt(training), learning_rate_factor(training)
    assert [factor(step) for step in range(81)] == [linear(step) for step in range(81)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    theirs = get_wsd_schedule(optimizer, 10, 20, 100, decay_type="1-sqrt", min_lr_ratio=0.1).lr_lambdas[0]
    assert_close([factor(step) for step in range(10, 101)], [theirs(step) for step in range(10, 101)], 1e-12)
