"""Exercises of docs/*.md: the solutions are correct."""

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from transformers import get_wsd_schedule

from conformance.oracle import assert_close, make_config, oracle_model, our_model, tiny_llama
from conformance.training import all_stages, step_of, wrapped
from conformance.worker_pool import WorkerPool
from docs.programs.trace_picture import draw, spans
from docs.solutions import measure, training_step
from docs.solutions.striped import pairs, striped_positions
from docs.solutions.z_loss import log_z
from picotron.config import Training
from picotron.console import UserError
from picotron.context_parallel.positions import local_positions
from picotron.optimizer.learning_rate import learning_rate_factor
from workbench.own_loops.batches import split_batch, train_batch
from workbench.schedules.actions import AnyAction, parse_action
from workbench.schedules.schedule_csv import read_csv

SOLUTIONS = Path("docs/solutions")

# --------------------------------------------------------------------------------------------------------- solutions


def z_loss() -> dict[str, Tensor]:
    config = make_config(distributed__tp_size=2, distributed__sequence_parallel=True)
    model, batches = wrapped(config, tiny_llama()), split_batch({"input_ids": torch.arange(32).view(2, 16)}, 1)
    step = step_of(config, tiny_llama())
    train_batch(step, model, batches, lambda head, x, batch: log_z(head, x).square().mean())
    return all_stages(model.module.module, "main_grad")


def test_z_loss_equals_one_process(pool: WorkerPool) -> None:
    model = oracle_model(tiny_llama(), our_model(tiny_llama(), seed=42).state_dict())
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


def test_fit_returns_the_latency_and_the_time_per_byte_of_exact_times() -> None:
    sizes = [4.0**k for k in range(10)]
    assert measure.fit(sizes, [3e-4 + 2e-9 * size for size in sizes]) == pytest.approx((3e-4, 2e-9), rel=1e-9)


def test_hidden_time_counts_overlapping_events_once_and_only_during_backward() -> None:
    events = [{"ts": 0.0, "dur": 4.0}, {"ts": 3.0, "dur": 3.0}, {"ts": 9.0, "dur": 5.0}]
    assert measure.hidden(events, {"ts": 2.0, "dur": 8.0}) == 4 + 1


def test_trace_is_drawn_to_scale_with_a_row_for_each_thread_of_gloo(tmp_path: Path) -> None:
    """Products of forward are left out. Times count from the start of backward, here at 2 ms."""
    events = [("aten::mm", 1, 0, 1000), ("backward", 1, 2000, 4000), ("aten::mm", 1, 3000, 2000)]
    events += [("gloo:all_reduce", 7, 5000, 4000), ("gloo:all_reduce", 8, 6000, 6000)]
    trace = {"traceEvents": [{"name": name, "tid": tid, "ts": ts, "dur": dur} for name, tid, ts, dur in events]}
    (tmp_path / "step.json").write_text(json.dumps(trace))
    found = spans(tmp_path / "step.json")
    assert found == [("backward", 1, 3), ("all-reduce 0", 3, 7), ("all-reduce 1", 4, 10)]
    boxes = [each for each in ElementTree.fromstring(draw({"step": found})).iter() if each.get("class") == "action"]
    left, width = ([float(box.attrib[key]) for box in boxes] for key in ("x", "width"))
    assert_close([(x - left[0]) / width[0] for x in left], [0, 1, 1.5], 1e-3)  # a box is 2, 4 or 6 ms wide
    assert_close([each / width[0] for each in width], [1, 2, 3], 1e-3)
    assert len({box.attrib["y"] for box in boxes}) == 3
