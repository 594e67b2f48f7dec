"""examples/grpo.py: the ratio of the first update is 1; the loss, the rewards and the prompts."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from conformance.worker_pool import WorkerPool
from examples.brackets.rewards import correct
from examples.grpo import TOY, Prompt, Task, data_of, learn, read_config, read_task
from picotron.console import UserError
from tests.fuzz.chat_templates import CHATML, TOOLS
from tests.support.examples import load, log_probs, make_trainer, results, save_model, save_weights
from tests.support.oracle import assert_close
from tests.support.program import options
from tests.support.samples import messages, read_jsonl, with_template, write_jsonl
from workbench.generation.rotation import Completion

LENGTH = 8


def run(arguments: list[str]) -> list[dict[str, float]]:
    config, options = read_config(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(config.distributed.world_size))
        task = read_task(config, options)
    trainer = make_trainer(config, data_of(config, task))
    learn(trainer, task)
    return results(trainer)[0]


def words_of(save_dir: Path, steps: int, **keys: Any) -> list[str]:
    keys = {"checkpoint__save_dir": save_dir, "training__total_train_steps": steps, **keys}
    return options(keys)


def test_the_toy_starts_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    task = read_task(*read_config(["--toy"]))
    assert task.reward(prompt="([", completion="])") == 1
    with pytest.raises(UserError, match="--reward is missing"):
        read_config([])


def test_the_first_ratio_is_one(pool: WorkerPool, tmp_path: Path) -> None:
    """So generation and training compute the same log-probabilities. After an update, they differ."""
    due = {"training__eval_frequency": 3, "checkpoint__save_frequency": 3}  # during the second round
    words = words_of(tmp_path, 4, **due)
    records = pool.run(run, 4, ["--toy", *words])[0]
    assert [record["step"] for record in records] == [2, 4]
    assert (tmp_path / "step_00000004").exists()
    for record in records:
        assert record["change 0"] < 1e-12
        assert record["change 1"] > 1e-3
    assert "evaluation" in records[1]
    assert "evaluation" not in records[0]


def test_the_second_update_with_the_same_samples_is_that_of_transformers(pool: WorkerPool, tmp_path: Path) -> None:
    """A run on a named model starts from its weights, which are also the reference. In the second update, the model has
    the weights of a run that ends after one.
    """
    shutil.copytree(TOY, start := tmp_path / "model")
    save_weights(start, LlamaConfig.from_pretrained(TOY))
    keys = {"model__name": start, "model__dtype": "float64", "dataset__name": start / "prompts.jsonl"}
    keys |= {"training__learning_rate": 1e-2, "training__seq_length": LENGTH, "distributed__pp_size": 2}
    keys |= {"distributed__dp_size": 1}  # the learning rate is constant
    for updates in (1, 2):
        words = [*words_of(tmp_path / str(updates), updates, **keys), "--beta", "0.5", "--updates", str(updates)]
        (record,) = pool.run(run, 2, [*words, "--reward", f"{TOY}/rewards.py:correct"])[0]
    model, reference = load(tmp_path / "1" / "step_00000001"), load(start)
    tokenizer, lines = AutoTokenizer.from_pretrained(start), read_jsonl(tmp_path / "2" / "completions.jsonl")
    assert [line["step"] for line in lines] == [2] * 32
    assert all(line["reward"] == correct(line["prompt"], line["completion"]) for line in lines)
    rewards = torch.tensor([line["reward"] for line in lines], dtype=torch.float64).view(2, 16)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    terms = []  # of each token: loss, divergence and change of the probability
    for line, advantage in zip(lines, advantages, strict=True):
        texts = line["prompt"], line["completion"]
        new, old = (log_probs(each, tokenizer, *texts, line["ended"]) for each in (model, reference))
        ratio = (new - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        terms.append(torch.stack([loss, 1 / ratio - 1 - (old - new), (ratio - 1).abs()]))
    loss, divergence, change = torch.cat(terms, 1).mean(1).tolist()
    assert max(each[2].max() for each in terms) > 0.2  # some ratios are beyond the clip
    assert max(record["kl 0"], record["change 0"]) < 1e-12
    assert_close(record["kl 1"], divergence, 1e-7)
    assert_close(record["change 1"], change, 1e-7)
    assert_close(record["loss"], loss + 0.5 * divergence, 1e-7)


def test_a_reward_gets_the_prompt_the_answer_and_all_other_keys_of_the_line(tmp_path: Path) -> None:
    with_template(save_model(tmp_path / "model"), TOOLS + CHATML)
    (tmp_path / "rewards.py").write_text(
        "def score(prompt, completion, answer, tools=()): return 10 * (completion == answer) + len(prompt)"
    )
    prompt, tools = messages([("user", "What is 2 + 2?")]), [{"type": "function", "function": {"name": "add"}}]
    lines = [{"prompt": prompt, "answer": "It is 4."}, {"prompt": "f(x)", "answer": " x"}]
    path = write_jsonl(tmp_path / "p.jsonl", [*lines, lines[0] | {"tools": tools}])
    keys = {"dataset__name": path, "model__name": tmp_path / "model", "training__seq_length": 90}
    keys |= {"distributed__dp_size": 1}
    config, options = read_config([*words_of(tmp_path, 2, **keys), "--reward", str(tmp_path / "rewards.py:score")])
    task = read_task(config, options)
    turns = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    texts = [task.encoder.decode(each.tokens) for each in task.prompts]
    assert texts == [turns, "f(x)", f"{json.dumps(tools[0])}\n{turns}"]
    answers = [Completion(task.encoder.encode_text(each) + task.encoder.ends, []) for each in ("It is 4.", " y")]
    assert task.compute_rewards(task.prompts[:2], answers) == [11, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beta 0.1", "--beta 0.1 needs a trained model"),
        ("--training.num_samples 1", "has 1 prompts, but evaluations hold out 16"),
        ("--training.micro_batch_size 9", "multiple of --samples 16"),
        ("--reward {rewards}:f", "unexpected keyword argument 'prompt'"),
        ("--dataset.name {path}", 'line 1: should be an object with a "prompt" or "messages"'),
    ],
)
def test_mistakes_are_named(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"text": "([<"}])
    (rewards := tmp_path / "rewards.py").write_text("def f(completion): return 1.0")
    with pytest.raises(UserError, match=re.escape(message)):
        read_task(*read_config(["--toy", *words.format(path=path, rewards=rewards).split()]))


def task_with(reward: Callable[..., Any]) -> Task:
    return Task([], [], SimpleNamespace(completion=lambda prompt, tokens: "a"), reward, 1, 1)


PROMPT = Prompt("p.jsonl, line 7", {"prompt": "b"}, [1])


@pytest.mark.parametrize("reward", ["0.5", math.nan])
def test_rewards_without_finite_squares_are_named_with_their_lines(reward: Any) -> None:
    with pytest.raises(UserError, match=re.escape(f"p.jsonl, line 7: the reward is {reward!r}")):
        task_with(lambda **_: reward).compute_rewards([PROMPT], [Completion([2], [0.0])])


def rewards_of_a_judge() -> list[float]:
    """Return the rewards of a judge that gives another one in every process."""
    return task_with(lambda **_: float(os.getpid())).rewards([PROMPT] * 2, [Completion([2], [0.0])] * 2).tolist()


def test_all_ranks_have_the_rewards_of_rank_0(pool: WorkerPool) -> None:
    first, second = pool.run(rewards_of_a_judge, 2)
    assert first == second
