"""Exercises of docs/*.md: the solutions are correct, and each classic mistake fails the test that its page names."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import get_wsd_schedule

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
from conformance.training import all_stages, pipeline_config, step_of, train, wrapped
from conformance.worker_pool import WorkerPool
from docs.programs import count
from docs.programs.mistakes import MISTAKES, run_test
from docs.solutions import checkpoints, sweeps, training_step
from docs.solutions.striped import pairs, striped_positions
from docs.solutions.z_loss import log_z
from picotron.batches import split_batch, train_batch
from picotron.config import Training
from picotron.console import UserError
from picotron.context_parallel.positions import local_positions
from picotron.explain.estimate import rank_memory
from picotron.optimizer import learning_rate_factor
from picotron.parallelize import check_layout
from picotron.schedules.actions import AnyAction, parse_action
from picotron.schedules.schedule_csv import read_csv
from puzzles.solutions import p13_bubble

SOLUTIONS = Path("docs/solutions")
# The message with which the test of each mistake fails.
FAILURES = {
    "loss_not_divided": r"grad norms: off by 2.000e\+00",  # three times as large; the losses are right
    "clipped_by_own_norm": "input_layernorm.weight differs between ranks",
    "decay_of_norms": "losses: off by",
    "schedule_one_step_late": "losses: off by",
    "same_sequences": "losses: off by",
    "gradients_not_divided": r"grad norms: off by 1.000e\+00",  # twice as large; the losses are right
    "loss_averaged_twice": "losses: off by 5.000e-01",
    "reduced_every_time": "a second backward reduces before finish_grad_sync",
    "partial_sums": "differs between ranks",
    "partial_gradients": "input_layernorm.weight differs between ranks",
    "copy_not_summed": "norm.weight differs between ranks",
    "norms_not_summed": "layernorm.weight differs between ranks",
    "head_norms_not_summed": "q_norm.weight differs between ranks",
    "norm_of_own_heads": "logits: off by",
    "micro_batches_not_divided": r"embed_tokens.weight: off by 2.000e\+00",  # three times as large
    "wrong_backward_first": "embed_tokens.weight: off by",
    "tied_embedding_forgotten": "the copies of model.embed_tokens.weight differ",
    "cp_not_averaged": "losses: off by",
    "wrong_tokens": "losses: off by",
    "positions_from_zero": "losses: off by",
    "future_seen": "losses: off by",
    "norm_of_own_slices": "losses: off by",
    "decay_by_shape_of_slice": "losses: off by",
    "weights_not_gathered": "losses: off by",
    "gradients_overwritten": "losses: off by",
    "every_token_is_the_first": r"assert \[\[",
    "empty_columns_seen": r"assert \[\[",
    "one_stream_of_draws": r"assert \[\[",
    "contiguous_shards": r"assert \[\(78, 78\), \(222, 222\)\] == \[\(150, 150\)",
}


# `make test` runs the most common mistakes, `make pages` the others.
CLASSICS = ("gradients_not_divided", "loss_averaged_twice", "partial_gradients", "wrong_backward_first", "cp_not_averaged", "contiguous_shards")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CLASSICS else pytest.mark.slow) for name in MISTAKES]
)
def test_mistake_fails_its_test(pool: WorkerPool, name: str) -> None:
    with pytest.raises(AssertionError, match=FAILURES[name]):
        run_test(MISTAKES[name], pool)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_shown_on_its_page(name: str) -> None:
    assert f"\n{name}: " in Path(f"docs/{MISTAKES[name].page}.md").read_text()


# Each table, and the pairs of its columns with a count and the formula for it.
COUNTS = [
    (count.gradients_sent, [(3, 4)]),
    (count.hidden_states_sent, [(4, 3)]),
    (count.layer_kept, [(2, 3)]),
    (count.stages_sent, [(5, 6)]),
    (count.keys_and_values_sent, [(1, 2), (4, 5)]),
    (count.work_and_memory, [(2, 3), (4, 5)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "columns"), COUNTS)
def test_counts_agree_with_formulas(table: Callable[[], Any], columns: list[tuple[int, int]]) -> None:
    """The formulas omit a few numbers per token, or per weight of a norm, as the pages mention."""
    _, *rows = table()
    for row in rows:
        for counted, formula in columns:
            assert row[counted] == pytest.approx(row[formula], rel=0.005), row[0]


# --------------------------------------------------------------------------------------------------------- solutions


def z_loss(layout: dict[str, Any]) -> dict[str, Tensor]:
    config = make_config(**{f"distributed__{key}": value for key, value in layout.items()})
    model = wrapped(config, tiny_llama())
    ids = torch.arange(32).view(2, 16)
    train_batch(
        step_of(config, tiny_llama()),
        model,
        split_batch({"input_ids": ids}, 1),
        lambda head, x, batch: log_z(head, x).square().mean(),
    )
    return all_stages(model.module.module, "main_grad")


@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}, {"tp_size": 4, "sequence_parallel": True}])
def test_z_loss_equals_one_process(pool: WorkerPool, layout: dict[str, Any]) -> None:
    model = oracle_model(tiny_llama(), our_model(tiny_llama(), seed=42).state_dict())
    model(input_ids=torch.arange(32).view(2, 16), use_cache=False).logits.logsumexp(-1).square().mean().backward()
    for gradients in pool.run(z_loss, layout.get("tp_size", 1), layout):
        for name, parameter in model.named_parameters():
            assert_close(gradients[name], parameter.grad, what=name)


def test_training_with_the_schedule_of_puzzle_13_equals_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "p13_bubble.csv"
    path.write_text("\n".join(",".join(p13_bubble.program(rank)) for rank in range(4)))
    config = pipeline_config(f"csv:{path}", 4, 8, training__total_train_steps=2)
    expected = oracle_training(config, tiny_llama(num_hidden_layers=4), random_tokens())
    for result in pool.run(train, 4, config, tiny_llama(num_hidden_layers=4)):
        assert_equals_training(result, expected)


def actions_by_rank(name: str) -> list[Counter[AnyAction]]:
    lines = (SOLUTIONS / f"{name}.csv").read_text().splitlines()
    return [Counter(map(parse_action, line.split(","))) for line in lines]


def test_deadlock_is_fixed_with_the_same_actions() -> None:
    with pytest.raises(UserError, match="deadlock: pp rank 0 waits at 0B0 for 1B0 of pp rank 1, which"):
        read_csv(SOLUTIONS / "deadlock.csv")
    read_csv(SOLUTIONS / "no_deadlock.csv")
    assert actions_by_rank("deadlock") == actions_by_rank("no_deadlock")


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_stripes_are_nearly_balanced(cp: int) -> None:
    work: dict[str, list[int]] = {
        "striped": [pairs(striped_positions(64, cp, rank)) for rank in range(cp)],
        **{
            name: [pairs(local_positions(64, cp, rank, name)) for rank in range(cp)]
            for name in ("zigzag", "contiguous")
        },
    }
    assert {sum(each) for each in work.values()} == {64 * 65 // 2}
    busiest: dict[str, Any] = {name: max(each) * cp / sum(each) for name, each in work.items()}
    assert busiest["zigzag"] == 1 < busiest["striped"] < 1.12 < busiest["contiguous"]


def test_wsd_with_a_root_equals_that_of_transformers() -> None:
    training = Training(total_train_steps=100, warmup_steps=10, min_lr_ratio=0.1, lr_scheduler="wsd", decay_steps=20)
    factor, linear = training_step.wsd_sqrt(training), learning_rate_factor(training)
    assert [factor(step) for step in range(81)] == [linear(step) for step in range(81)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    theirs = get_wsd_schedule(optimizer, 10, 20, 100, decay_type="1-sqrt", min_lr_ratio=0.1).lr_lambdas[0]
    assert_close([factor(step) for step in range(10, 101)], [theirs(step) for step in range(10, 101)], 1e-12)


def test_safetensors_rows_and_sizes_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5, 2, dtype=torch.float64)}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"c": torch.ones(7)}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    save_file({"a": torch.ones(3, 4)}, tmp_path / "exp_avg.safetensors", {"format": "pt"})
    for name, tensor in tensors.items():
        for row in range(len(tensor)):
            data = checkpoints.read_row(tmp_path / "model-00001-of-00002.safetensors", name, row)
            assert data == tensor[row].numpy().tobytes()
    assert checkpoints.sizes(tmp_path) == {"exp_avg": (12, 48), "model": (29, 156)}


def test_number_of_layouts_equals_an_enumeration() -> None:
    for n in (1, 2, 8, 12, 30):
        sizes = [size for size in range(1, n + 1) if n % size == 0]
        layouts = [layout for layout in itertools.product(sizes, repeat=4) if math.prod(layout) == n]
        assert sweeps.number_of_layouts(n) == len(layouts)


def test_best_run_is_the_completed_one_with_the_lowest_loss(tmp_path: Path) -> None:
    table = "name,status,final_loss\na,completed,3.5\nb,fail,1.5\nc,completed,2.5\nd,init,\n"
    (tmp_path / "metrics.csv").write_text(table)
    assert sweeps.best_run(tmp_path / "metrics.csv") == "c"


def test_job_waits_for_the_previous_one_of_its_chain() -> None:
    assert [sweeps.waits_for(job, 2) for job in range(5)] == [None, None, 0, 1, 2]


def test_afab_holds_twice_the_activations_of_twice_as_many_micro_batches() -> None:
    """docs/memory.md, exercise 2: 1F1B holds those of p micro-batches, however many there are."""
    model = tiny_llama(num_hidden_layers=4)
    held = {}
    for engine, micro_batches in itertools.product(("afab", "1f1b"), (4, 8)):
        config = pipeline_config(engine, 4, micro_batches)
        held[engine, micro_batches] = rank_memory(config, model, check_layout(config, model))[0].activations
    assert held["afab", 4] == held["1f1b", 4] == held["1f1b", 8]
    assert held["afab", 8] == 2 * held["afab", 4]
