"""Reinforcement learning in a page:  torchrun --nproc_per_node 4 -m examples.grpo

A question is a few opening brackets, such as `( [ <`, and the answer closes them: `> ] )` and the end token. Nobody
shows the model an answer. It tries, a program computes the reward, and samples with a higher reward than others of the
same question become likelier: Group Relative Policy Optimization (GRPO, Shao et al. 2024, arXiv:2402.03300), with two
changes of DAPO (Yu et al. 2025, arXiv:2503.14476): there is no penalty for the distance to a reference model, and the
loss is the mean over all drawn tokens of a batch, so that each token of a long answer counts as much as one of a short
answer. (GRPO takes the mean over the tokens of each answer first, and then over the answers.)

The weights that learn also generate, in the layout of examples/grpo.json, dp 2 x pp 2, or in any other.
"""

import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from picotron.batches import split_batch, train_batch
from picotron.check_batches import Batch
from picotron.command_line import load_config
from picotron.config import Config
from picotron.console import UserError, print_line
from picotron.generation.rotation import Completion, generate
from picotron.generation.sampling import Sampling
from picotron.model.weights import initial_weights
from picotron.optimizer import AdamW, make_scheduler, update_weights
from picotron.parallelize import build_model, check_layout
from picotron.process_group_manager import setup_process_group_manager
from picotron.run.launch import check_world_size, exit_on_error, init_process_group, set_up_device
from picotron.run.run_folder import claim_save_dir, user_error_on_failure
from picotron.train_step import make_train_step

CONFIG = "examples/grpo.json"
USED = """
    distributed environment checkpoint.save_dir model.dtype model.use_flash_attention model.use_fused_adam training.seed
    training.learning_rate training.lr_scheduler training.warmup_steps training.min_lr_ratio training.weight_decay
    training.adam_beta1 training.adam_beta2 training.adam_eps training.max_grad_norm training.total_train_steps
    training.seq_length training.micro_batch_size training.gradient_accumulation_steps
    training.activation_checkpointing training.compile
"""  # sections and keys of the config; the others have no effect
END, CLOSING = 0, {1: 4, 2: 5, 3: 6}  # tokens: the end, and the closing bracket of each opening one
DEPTH, QUESTIONS, SAMPLES, UPDATES = 3, 16, 16, 2  # most brackets; per round: questions, samples of each, updates
CLIP = 0.2
MODEL = LlamaConfig(
    vocab_size=7, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16, initializer_range=0.06, pad_token_id=None,
)  # fmt: skip
ALL_QUESTIONS = [list(each) for depth in range(1, DEPTH + 1) for each in itertools.product(CLOSING, repeat=depth)]


def reward(question: list[int], tokens: list[int]) -> float:
    """Return the fraction of the answer that is correct before the first mistake."""
    answer = [CLOSING[bracket] for bracket in reversed(question)] + [END]
    pairs = itertools.zip_longest(answer, tokens)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(answer)


def rows_of(prompts: list[list[int]], completions: list[Completion], advantages: Tensor, length: int) -> Batch:
    """Return a row for each sample: its tokens, which of them were drawn, and with which log-probabilities."""
    integers, numbers = torch.zeros(2, len(prompts), length, dtype=torch.int64), torch.zeros(2, len(prompts), length)
    (ids, targets), (drawn, log_probs) = integers, numbers.double()
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        text, first = prompt + completion.tokens, len(prompt) - 1
        ids[row, : len(text) - 1], targets[row, : len(text) - 1] = torch.tensor(text[:-1]), torch.tensor(text[1:])
        drawn[row, first : len(text) - 1] = 1
        log_probs[row, first : len(text) - 1] = torch.tensor(completion.log_probs, dtype=torch.float64)
    return {"input_ids": ids, "target_ids": targets, "drawn": drawn, "log_probs": log_probs, "advantages": advantages}


def clipped_ratio(head: Any, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute the loss of PPO (Schulman et al. 2017, arXiv:1707.06347): tokens of samples with a positive advantage
    should become likelier, but not by more than the factor 1 + CLIP, beyond which the gradient is 0. Returns the sum
    over the drawn tokens and their number, by which `train_batch` divides the sum over all micro-batches.
    """
    ratio = (head.log_probs(x, batch["target_ids"]) - batch["log_probs"]).exp()  # new over old probability
    advantages = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    drawn = batch["drawn"]
    return -(gain * drawn).sum(), drawn.sum(), {"change": ((ratio - 1).abs() * drawn).sum()}


def check_config(config: Config) -> None:
    """Raise a UserError for each key that has no effect here, or does not fit the batch of a round."""
    ours, rows, length = load_config(["--config", CONFIG]), QUESTIONS * SAMPLES, 2 * DEPTH + 1
    problems = [
        f"{section}.{key}={value!r} has no effect in examples/grpo.py; remove it"
        for section, keys in config.model_dump().items()
        for key, value in keys.items()
        if value != ours.model_dump()[section][key] and not {section, f"{section}.{key}"} & {*USED.split()}
    ]
    steps, found = config.training.total_train_steps, config.global_batch_size
    if steps % UPDATES:
        problems.append(f"total_train_steps={steps} should be a multiple of {UPDATES}, the updates of a round")
    if found != rows:
        text = "dp_size x micro_batch_size x gradient_accumulation_steps"
        problems.append(f"{text} is {found}, but should be {rows}, the samples of a round; change one of them")
    if config.training.seq_length < length:
        problems.append(
            f"training.seq_length={config.training.seq_length} should be at least {length}, for all brackets"
        )
    if problems:
        raise UserError(*problems)


def evaluate(stage: Any) -> dict[str, float]:
    """Compute the reward of the likeliest answers to all questions, and the fraction that is solved."""
    answers = generate(stage, ALL_QUESTIONS, Sampling(DEPTH + 2, ends=(END,)))
    rewards = [reward(question, each.tokens) for question, each in zip(ALL_QUESTIONS, answers, strict=True)]
    return {"evaluation": sum(rewards) / len(rewards), "solved": rewards.count(1.0) / len(rewards)}


def learn(config: Config, device: torch.device) -> Iterator[dict[str, float]]:
    """Train, and yield a record of each round, which draws samples and takes UPDATES steps with them: the mean reward
    of the samples, and the mean change of the ratio in each update. Every 10th record, and the last one, also has the
    results of an evaluation before the round.
    """
    layout, training, dtype = config.distributed, config.training, getattr(torch, config.model.dtype)
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    plan = check_layout(config, MODEL)
    model = build_model(config, MODEL, plan, device, dtype, initial_weights(MODEL, training.seed))
    stage: Any = model.module
    optimizer = AdamW(model.parameters(), training, config.model.use_fused_adam)
    scheduler = make_scheduler(optimizer, training)
    take_step = make_train_step(config, MODEL, plan, device, dtype)
    sampling = Sampling(DEPTH + 2, temperature=1.0, seed=training.seed, ends=(END,))
    for step in range(0, training.total_train_steps, UPDATES):
        record: dict[str, float] = {"step": step}
        if step % (10 * UPDATES) == 0:
            record |= evaluate(stage)
        dice = random.Random(f"questions {training.seed} {step}")  # the same questions on every rank
        questions = [dice.choices(list(CLOSING), k=dice.randint(1, DEPTH)) for _ in range(QUESTIONS)]
        prompts = [question for question in questions for _ in range(SAMPLES)]
        completions = generate(stage, prompts, sampling, first=step * len(prompts))
        rewards = [reward(prompt, completion.tokens) for prompt, completion in zip(prompts, completions, strict=True)]
        of_question = torch.tensor(rewards, dtype=torch.float64).view(QUESTIONS, SAMPLES)
        deviation, spread = of_question - of_question.mean(1, keepdim=True), of_question.std(1, keepdim=True)
        batch = rows_of(prompts, completions, (deviation / (spread + 1e-4)).flatten(), training.seq_length)
        batches = split_batch(batch, training.gradient_accumulation_steps, layout.cp_sharding)
        record["reward"] = of_question.mean().item()
        for update in range(UPDATES):
            _, statistics = train_batch(take_step, model, batches, clipped_ratio)
            record[f"change {update}"] = statistics["change"]
            update_weights(model, optimizer, training.max_grad_norm)
            scheduler.step()
        yield record
    yield {"step": training.total_train_steps} | evaluate(stage)


def main() -> None:
    config = load_config(["--config", CONFIG, *sys.argv[1:]])
    check_config(config)
    check_world_size(config.distributed, int(os.environ.get("WORLD_SIZE", 1)))
    claim_save_dir(config)
    device = set_up_device(config)
    init_process_group(config, device)
    path = Path(config.checkpoint.save_dir, "rewards.jsonl")
    for record in learn(config, device):
        if dist.get_rank() == 0:
            with user_error_on_failure(path), open(path, "a" if record["step"] else "w") as file:
                file.write(json.dumps(record) + "\n")
            if "evaluation" in record:
                print_line(" | ".join(f"{name} {value:.3g}" for name, value in record.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_error(main)
