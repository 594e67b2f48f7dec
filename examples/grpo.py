"""Reinforcement learning in a page:  python -m examples.grpo --toy

Nobody shows the model an answer. It tries, a program computes the reward, and samples with a higher reward than others
of the same prompt become likelier: Group Relative Policy Optimization (GRPO, Shao et al. 2024, arXiv:2402.03300), with
two changes of DAPO (Yu et al. 2025, arXiv:2503.14476): there is no penalty for the distance to a reference model
unless --beta asks for one, and the loss is the mean over all drawn tokens of a batch, so that each token of a long
answer counts as much as one of a short answer. (GRPO takes the mean over the tokens of each answer first.)

The weights that learn also generate, in any layout. With --toy, the task is examples/brackets: a model with random
weights, on dp 2 x pp 2. For your own model, prompts and reward, the defaults are those of examples/grpo.json, which
suit a pretrained model (a learning rate of 1e-6, in float32):

    python -m examples.grpo --model.name DIR --dataset.name prompts.jsonl \\
        --reward my_rewards.py:brevity

A line of the file has a "prompt" (or "messages"), a text or a list of messages, and all else that the reward needs. The
reward is a function of these keys and of the completion, such as `def brevity(prompt, completion): return
-len(completion)`. A prompt and its completion together have up to seq_length + 1 tokens: seq_length inputs, and the
last target. All completions are in completions.jsonl, next to metrics.jsonl, also those of steps that are taken again.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import logging
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.config import Config
from picotron.console import UserError
from workbench.console import number, print_line
from workbench.generation.prompts import Encoder, prompt_of
from workbench.generation.rotation import Completion, generate
from workbench.generation.sampling import Sampling
from workbench.own_loops.batches import Batch
from workbench.own_loops.log_probs import log_probs
from workbench.own_loops.trainer import (
    RECORD_KEYS,
    Data,
    FrozenModel,
    Trainer,
    check_used,
    fingerprint,
    run_program,
    set_up,
    used_keys,
)
from workbench.pipelines.engine import check_run
from workbench.prepare.documents import load_documents
from workbench.prepare.tokens import convert, read_tokenizer, tokenizer_folder
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.config_reader import config_parser, load_config
from workbench.run.model_config import ends_of_both
from workbench.run.rows import held_out_sequences
from workbench.run.run_folder import COMPLETIONS, user_error_on_failure

logger = logging.getLogger("picotron")

DEFAULTS, TOY = Path(__file__).with_suffix(".json"), Path(__file__).parent / "brackets"
ALSO_USED = f"{RECORD_KEYS} training.eval_frequency training.eval_steps"
CLIP = 0.2


class Prompt(NamedTuple):
    """A line of the file, its place, and the tokens of its prompt."""

    place: str
    record: dict[str, Any]
    tokens: list[int]


class Task(NamedTuple):
    """What to learn, and how: `samples` completions of each prompt, and `updates` optimizer steps with them; `beta` is
    the weight of the penalty for the distance to the model at the start, None without this reference.
    """

    prompts: list[Prompt]
    held_out: list[Prompt]
    encoder: Encoder
    reward: Callable[..., float]
    samples: int
    updates: int
    beta: float | None = None

    def rewards(self, prompts: list[Prompt], completions: list[Completion]) -> Tensor:
        """Return the rewards of completions. Rank 0 computes them, because a reward may be random, or the answer of
        another model.
        """
        is_first = dist.get_rank() == 0
        numbers = run_on_all_ranks(lambda: self.compute_rewards(prompts, completions) if is_first else [])[0]
        return torch.tensor(numbers, dtype=torch.float64)

    def compute_rewards(self, prompts: list[Prompt], completions: list[Completion]) -> list[float]:
        """Compute the rewards of completions, without their end tokens."""
        rewards = []
        for prompt, completion in zip(prompts, completions, strict=True):
            text = self.encoder.completion(prompt.tokens, completion.tokens)
            reward = self.reward(**prompt.record, completion=text)
            if not isinstance(reward, SupportsFloat) or not abs(reward) <= 1e30:  # so that variances are finite
                raise UserError(f"{prompt.place}: the reward is {reward!r:.80}; return a number from -1e30 to 1e30")
            rewards.append(float(reward))
        return rewards


def rows_of(prompts: list[Prompt], completions: list[Completion], advantages: Tensor, length: int) -> Batch:
    """Return a row for each sample: its tokens, which of them were drawn, and with which log-probabilities."""
    ids, targets = torch.zeros(2, len(prompts), length, dtype=torch.int64)
    drawn, log_probs = torch.zeros(2, len(prompts), length, dtype=torch.float64)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        text, end = torch.tensor(prompt.tokens + completion.tokens), len(prompt.tokens) + len(completion.tokens) - 1
        ids[row, :end], targets[row, :end] = text[:-1], text[1:]
        drawn[row, len(prompt.tokens) - 1 : end] = 1
        log_probs[row, len(prompt.tokens) - 1 : end] = torch.tensor(completion.log_probs, dtype=torch.float64)
    return {"input_ids": ids, "target_ids": targets, "drawn": drawn, "log_probs": log_probs, "advantages": advantages}


def clipped_ratio(head: Any, x: Tensor, batch: Batch, beta: float = 0.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute the loss of PPO (Schulman et al. 2017, arXiv:1707.06347): tokens of samples with a positive advantage
    should become likelier, but not by more than the factor 1 + CLIP, beyond which the gradient is 0. Returns the sum
    over the drawn tokens and their number, by which `train_batch` divides the sum over all micro-batches.

    With the log-probabilities of a reference, it adds GRPO's penalty: beta times an estimate of the KL divergence from
    the reference, which is without bias for samples of the model itself (Schulman 2020, "Approximating KL divergence").
    """
    new = log_probs(head, x, batch["target_ids"])
    ratio = (new - batch["log_probs"]).exp()  # new over old probability
    advantages = batch["advantages"][:, None]
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    drawn, statistics = batch["drawn"], {"change": (ratio - 1).abs()}
    if "reference" in batch:
        log_ratio = (batch["reference"] - new) * drawn  # elsewhere, its exponential could be infinite
        statistics["kl"] = log_ratio.exp() - 1 - log_ratio
        loss = loss + beta * statistics["kl"]
    return (loss * drawn).sum(), drawn.sum(), {name: (each * drawn).sum() for name, each in statistics.items()}


def log_completions(trainer: Trainer, task: Task, samples: Iterable[tuple[Prompt, Completion, float, bool]]) -> None:
    """Append completions to completions.jsonl, with their rewards and whether they ended; print the best and the worst
    one if the step is printed.
    """
    path = Path(trainer.config.checkpoint.save_dir, COMPLETIONS)
    lines: list[dict[str, Any]] = []
    for prompt, completion, reward, ended in samples:
        given, text = prompt_of(prompt.record), task.encoder.completion(prompt.tokens, completion.tokens)
        prompt_and_text = {"prompt": given.get("prompt", given.get("messages")), "completion": text}
        lines.append({"step": trainer.progress.step, **prompt_and_text, "reward": reward, "ended": ended})
    with user_error_on_failure(path), open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    if trainer.progress.is_printed(trainer.config):
        for name, choose in (("best", max), ("worst", min)):
            line = choose(lines, key=lambda line: line["reward"])
            question = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
            print_line(f"{name}: {question!r:.200} -> {line['completion']!r:.500} | reward {line['reward']:.6g}")


def learn(trainer: Trainer, task: Task) -> None:
    """Train. The record of a round has the mean reward of the samples, the share that ended, the mean change of the
    ratio and divergence from the reference in each update, and every `eval_frequency` steps the mean reward of the
    likeliest answers to held-out prompts.
    """
    training, stage = trainer.config.training, trainer.stage
    reference, loss_fn = None, clipped_ratio
    if task.beta is not None:
        reference = FrozenModel(trainer.config, trainer.config.model.name, trainer.device)
        loss_fn = functools.partial(clipped_ratio, beta=task.beta)
    ends = tuple(ends_of_both(trainer.model_config, task.encoder.tokenizer))
    greedy = Sampling(training.seq_length, ends=ends, max_length=training.seq_length + 1)
    sampling = dataclasses.replace(greedy, temperature=1.0, seed=training.seed)
    for step in trainer.steps():
        numbers = trainer.next_samples(len(task.prompts), task.samples, task.updates)
        prompts = [task.prompts[i] for i in numbers for _ in range(task.samples)]
        completions = generate(stage, [prompt.tokens for prompt in prompts], sampling, first=step * len(prompts))
        rewards = task.rewards(prompts, completions).view(-1, task.samples)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        batches = trainer.split(rows_of(prompts, completions, advantages.flatten(), training.seq_length))
        if reference is not None:
            batches = reference.add_to(
                batches, "reference", lambda head, x, batch: log_probs(head, x, batch["target_ids"])
            )
        record: dict[str, float] = {}
        for update in range(task.updates):
            record |= trainer.train(batches, loss_fn)
            record |= {f"{name} {update}": record.pop(name) for name in ("change", "kl") if name in record}
        record["reward"] = rewards.mean().item()
        ended = [completion.tokens[-1] in ends for completion in completions]
        record["ended"] = sum(ended) / len(ended)
        if task.held_out and record["step"] // training.eval_frequency > step // training.eval_frequency:
            answers = generate(stage, [prompt.tokens for prompt in task.held_out], greedy)
            record["evaluation"] = task.rewards(task.held_out, answers).mean().item()
        trainer.log(record)
        if dist.get_rank() == 0:
            log_completions(trainer, task, zip(prompts, completions, rewards.flatten().tolist(), ended, strict=True))


def load_reward(name: str, prompts: list[Prompt]) -> Callable[..., float]:
    """Load a function of a Python file, named FILE.py:FUNCTION, and check that it takes the keys of all lines."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"--reward {name}: there is no Python file {path!r}; use FILE.py:FUNCTION")
    if not callable(found := runpy.run_path(path).get(function)):
        raise UserError(f"--reward {name}: {path} has no function {function!r}; choose another name")
    signature = inspect.signature(found)
    for prompt in prompts:
        try:
            signature.bind(**prompt.record, completion="")
        except TypeError as error:
            names = ", ".join([*prompt.record, "completion"])
            raise UserError(f"{prompt.place}: {name}{signature}: {error}; it is called with {names}") from None
    return found


def read_prompts(config: Config, encoder: Encoder) -> list[Prompt]:
    """Read the prompts, and check that each leaves room for an answer."""
    length = config.training.seq_length

    def encode(record: Any) -> Iterator[tuple[dict[str, Any], list[int]]]:
        prompt = prompt_of(record)
        if "completion" in record:
            raise UserError('the key "completion" is the argument of the reward with the sample; rename it')
        tokens = encoder.encode("", prompt)
        if len(tokens) > length:
            raise UserError(f"the prompt has {len(tokens)} tokens, but training.seq_length={length}; use a longer one")
        yield record, tokens

    documents = load_documents(config.dataset, config.training.num_samples, config.training.seed, columns={})
    return [Prompt(record.place, *each) for record in documents.records() for each in convert(record, encode)]


def read_config(arguments: list[str]) -> tuple[Config, argparse.Namespace]:
    """Return the config and the options of a command line."""
    parser = config_parser("Train by a reward.", used_keys(ALSO_USED))
    parser.add_argument("--toy", action="store_true", help=f"train a model with random weights on the task in {TOY}")
    parser.add_argument("--reward", help="FILE.py:FUNCTION of (prompt, completion, ...)")
    text = (
        "weight of the penalty for the divergence from the model at the start; 0: only log it [none: no second model]"
    )
    parser.add_argument("--beta", type=number(float, 0), help=text)
    parser.add_argument("--samples", type=number(int, 2), default=16, help="completions of each prompt [16]")
    parser.add_argument("--updates", type=number(int, 1), default=2, help="optimizer steps with the same samples [2]")
    options, others = parser.parse_known_args(arguments)
    words = ["--config", str(DEFAULTS)]
    if options.toy:
        words = ["--config", f"{TOY}/grpo.json", "--model.name", str(TOY), "--dataset.name", f"{TOY}/prompts.jsonl"]
        options.reward = options.reward or f"{TOY}/rewards.py:correct"
    if options.reward is None:
        raise UserError("--reward is missing; use --reward FILE.py:FUNCTION, or --toy for a task with a reward")
    config = load_config([*words, *others])
    check_used(config, ALSO_USED)
    if options.beta is not None and not config.model.pretrained:
        raise UserError(f"--beta {options.beta:g} needs a trained model, but model.pretrained=false; remove --beta")
    steps, rows = config.training.total_train_steps, config.global_batch_size
    if steps % options.updates:
        raise UserError(f"total_train_steps={steps} should be a multiple of --updates {options.updates}; change one")
    if rows % options.samples:
        sizes = "dp_size x micro_batch_size x gradient_accumulation_steps"
        raise UserError(f"{sizes} is {rows}, but should be a multiple of --samples {options.samples}; change one")
    return config, options


def read_task(config: Config, options: argparse.Namespace) -> Task:
    """Read the prompts and the reward. An evaluation holds out as many prompts as `eval_steps` batches have."""
    model_config, _ = check_run(config)
    encoder = Encoder(read_tokenizer(config, model_config), config.model.tokenizer or config.model.name)
    prompts, held_out = read_prompts(config, encoder), held_out_sequences(config) // options.samples
    if len(prompts) <= held_out:
        raise UserError(
            f"{config.dataset.name} has {len(prompts)} prompts, but evaluations hold out {held_out}; use more prompts"
        )
    first = len(prompts) - held_out
    rooms = [config.training.seq_length + 1 - len(prompt.tokens) for prompt in prompts]
    logger.info("%d prompts with room for answers of %d to %d tokens", len(prompts), min(rooms), max(rooms))
    reward = load_reward(options.reward, prompts)
    return Task(prompts[:first], prompts[first:], encoder, reward, options.samples, options.updates, options.beta)


def data_of(config: Config, task: Task) -> Data:
    """Return the data of a run. The fingerprint includes the numbers of rows and steps per prompt, on which the
    position of a checkpoint in the data depends.
    """
    samples = [(task.samples, task.updates), *((prompt.record, prompt.tokens) for prompt in task.prompts)]
    return Data(fingerprint(config, samples), tokenizer_folder(task.encoder.tokenizer))


def train(config: Config, options: argparse.Namespace) -> None:
    """Train on this rank."""
    task = read_task(config, options)
    with set_up(config, data_of(config, task)) as trainer:
        learn(trainer, task)


if __name__ == "__main__":
    run_program(read_config, train)
