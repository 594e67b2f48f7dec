"""examples/grpo.py: the ratio of the first update is 1, two layouts learn the same, and the evaluation rises."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo import DEPTH, MODEL, check_config, clipped_ratio, learn, main, reward, rows_of
from picotron.command_line import load_config
from picotron.console import UserError
from picotron.generation.rotation import Completion
from tests.support.oracle import CPU, assert_close, our_model
from tests.support.training import layout_name
from tests.support.worker_pool import WorkerPool


def run(words: list[str]) -> list[dict[str, float]]:
    config = load_config(["--config", "examples/grpo.json", *words])
    check_config(config)
    return list(learn(config, CPU))


def words_of(steps: int, **keys: Any) -> list[str]:
    keys = {"training.total_train_steps": steps, **{key.replace("__", "."): value for key, value in keys.items()}}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


LAYOUTS: list[dict[str, Any]] = [
    {"dp_size": 1, "pp_size": 1, "tp_size": 2},
    {"dp_size": 1, "pp_size": 2, "pp_engine": "zb_h1"},
    {"dp_size": 1, "pp_size": 1, "cp_size": 2},
]


@pytest.mark.parity
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_layouts_learn_the_same(pool: WorkerPool, layout: dict[str, Any]) -> None:
    expected, *others = pool.run(run, 4, words_of(12))
    assert others == [expected] * 3
    words = words_of(
        12, **{f"distributed__{key}": value for key, value in layout.items()}, training__micro_batch_size=64
    )
    for result in pool.run(run, 2, words):
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for key in ("step", "reward", "evaluation", "solved"):
                assert ours.get(key) == theirs.get(key)
            assert_close(ours.get("change 1", 0), theirs.get("change 1", 0), 1e-6)
    assert expected[-2]["reward"] > expected[0]["reward"]


def test_the_first_ratio_is_one(pool: WorkerPool) -> None:
    """So generation and training compute the same log-probabilities. After an update, they differ."""
    *records, last = pool.run(run, 4, words_of(4))[0]
    assert [record["step"] for record in (*records, last)] == [0, 2, 4]
    for record in records:
        assert record["change 0"] < 1e-12
        assert record["change 1"] > 1e-3
    assert last.keys() == {"step", "evaluation", "solved"}


@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_evaluation_rises(pool: WorkerPool, seed: int) -> None:
    records = pool.run(run, 4, words_of(80, training__seed=seed), timeout=400)[0]
    evaluations = [record["evaluation"] for record in records if "evaluation" in record]
    assert evaluations[0] < 0.2
    assert evaluations[-1] > 0.5


def test_reward_counts_tokens_before_the_first_mistake() -> None:
    question, answer = [1, 2], [5, 4, 0]
    assert [reward(question, answer[:n]) for n in range(4)] == [0, 1 / 3, 2 / 3, 1]
    assert reward(question, [5, 5, 0]) == 1 / 3
    assert reward(question, [4, 4, 0]) == 0
    assert reward(question, [*answer, 1]) == 1


def test_loss_is_that_of_each_sample_alone() -> None:
    """Padding and the prompt do not count, and ratios beyond the clip have no gradient."""
    model, generator = our_model(MODEL), torch.Generator().manual_seed(0)
    prompts, tokens = [[1], [2, 3, 1]], [[4, 0], [4, 6, 5, 0]]
    old = [torch.randn(len(each), generator=generator).sub(1.9).tolist() for each in tokens]
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
    completions = [Completion(*pair) for pair in zip(tokens, old, strict=True)]
    batch = rows_of(prompts, completions, advantages, 2 * DEPTH + 1)
    embedded, positions = model.embed(batch["input_ids"]), torch.arange(2 * DEPTH + 1)[None]
    x = model.model.norm(model.run_layers(embedded, positions, range(2), None))
    loss, count, statistics = clipped_ratio(model.lm_head, x, batch)
    expected, change = 0.0, 0.0
    for prompt, completion, advantage in zip(prompts, completions, advantages.tolist(), strict=True):
        ids = torch.tensor([prompt + completion.tokens])
        log_probs = model(ids).log_softmax(-1)[0]
        for i, (token, before) in enumerate(zip(*completion, strict=True)):
            ratio = (log_probs[len(prompt) - 1 + i, token] - before).exp().item()
            expected -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            change += abs(ratio - 1)
    assert count == 6
    assert_close(loss.item(), expected, 1e-12)
    assert_close(statistics["change"].item(), change, 1e-12)


def test_config_of_the_example_fits_its_batch() -> None:
    data = json.loads(Path("examples/grpo.json").read_text())
    assert data["distributed"] == {"use_cpu": True, "dp_size": 2, "pp_size": 2}
    check_config(load_config(["--config", "examples/grpo.json"]))


def test_the_learning_rate_follows_its_schedule(pool: WorkerPool) -> None:
    constant, warm_up = (pool.run(run, 4, words_of(4, **keys))[0] for keys in ({}, {"training__warmup_steps": 3}))
    assert warm_up[0]["change 1"] < constant[0]["change 1"] / 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--training.max_tokens 1", "training.max_tokens=1 has no effect in examples/grpo.py; remove it"),
        ("--training.eval_frequency 5", "training.eval_frequency=5 has no effect"),
        ("--checkpoint.load_path /nonexistent", "checkpoint.load_path='/nonexistent' has no effect"),
        ("--checkpoint.save_frequency 5", "checkpoint.save_frequency=5 has no effect"),
        ("--model.name other --model.pretrained true", "2 problems:\n  - model.name='other' has no effect"),
        ("--model.num_hidden_layers 4", "model.num_hidden_layers=4 has no effect"),
        ("--dataset.name other", "dataset.name='other' has no effect"),
        ("--logging.use_wandb true", "logging.use_wandb=True has no effect"),
        ("--explain", "--explain describes a run of train.py; remove it"),
        ("--training.total_train_steps 5", "total_train_steps=5 should be a multiple of 2"),
        ("--training.micro_batch_size 8", "gradient_accumulation_steps is 64, but should be 256"),
        ("--training.seq_length 4", "training.seq_length=4 should be at least 7"),
    ],
)
def test_keys_without_an_effect_are_rejected(words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
    with pytest.raises(UserError, match=message):
        main()


@pytest.mark.parity
def test_program_writes_each_record_and_rejects_a_folder_that_cannot_be_written_at_the_start(tmp_path: Path) -> None:
    words = words_of(2, distributed__dp_size=1, distributed__pp_size=1, training__micro_batch_size=64)
    command = [sys.executable, "-m", "examples.grpo", *words, "--checkpoint.save_dir"]
    result = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "rewards.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 2]
    assert result.stdout.startswith("step 0 | evaluation")
    result = subprocess.run([*command, "/proc/nope"], capture_output=True, text=True, timeout=120)
    assert "error: checkpoint.save_dir='/proc/nope' cannot be written" in result.stderr
    assert "step 0" not in result.stdout
