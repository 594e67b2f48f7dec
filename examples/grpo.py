"""Reinforcement learning in a page:  torchrun --nproc_per_node 4 -m examples.grpo

A question is a few opening brackets, such as `( [ <`, and the answer closes them: `> ] )` and the end token. Nobody
shows the model an answer. It tries, a program computes the reward, and samples with a higher reward than others of the
same question become likelier: Group Relative Policy Optimization (GRPO, Shao et al. 2024, arXiv:2402.03300), without
its penalty for the distance to a reference model.

The weights that learn also generate, in the layout of examples/grpo.json, dp 2 x pp 2, or in any other.
"""

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from picotron.batches import split_batch, train_batch
from picotron.check_batches import Batch
from picotron.config import Config
from picotron.config_reader import load_config
from picotron.console import print_line
from picotron.files import write_atomically
from picotron.launch import check_world_size, exit_on_error, init_process_group, set_up_device
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.parallelize import build_model, check_layout
from picotron.pipeline_parallel.generation import Completion, generate
from picotron.process_group_manager import setup_process_group_manager
from picotron.sampling import Sampling
from picotron.train_step import make_train_step
from picotron.weights import initial_weights

END, CLOSING = 0, {1: 4, 2: 5, 3: 6}  # tokens: the end, and the closing bracket of each opening one
DEPTH, QUESTIONS, SAMPLES, UPDATES = 3, 16, 16, 2  # largest number of brackets; per step: samples of each question
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
    should become likelier, but not by more than the factor 1 + CLIP, beyond which the gradient is 0.
    """
    ratio = (head.log_probs(x, batch["target_ids"]) - batch["log_probs"]).exp()  # new over old probability
    advantages = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    drawn = batch["drawn"]
    return -(gain * drawn).sum(), drawn.sum(), {"change": ((ratio - 1).abs() * drawn).sum()}


def learn(config: Config, device: torch.device) -> list[dict[str, float]]:
    """Train, and return a record of each step: the mean reward of its samples, and the mean change of the ratio in each
    update. Every 10th step also has the reward of an evaluation, the likeliest answers to all questions.
    """
    layout, training, dtype = config.distributed, config.training, getattr(torch, config.model.dtype)
    grid = setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    plan = check_layout(config, MODEL)
    model = build_model(config, MODEL, plan, device, dtype, initial_weights(MODEL, training.seed))
    stage: Any = model.module
    optimizer = AdamW(model.parameters(), training, config.model.use_fused_adam)
    take_step = make_train_step(config, MODEL, plan, device, dtype)
    sampling = Sampling(DEPTH + 2, temperature=1.0, seed=training.seed, ends=(END,))
    greedy = Sampling(DEPTH + 2, ends=(END,))
    records = []
    for step in range(training.total_train_steps + 1):
        record: dict[str, float] = {"step": step}
        if step % 10 == 0:
            answers = generate(stage, ALL_QUESTIONS, greedy)
            rewards = [reward(*pair) for pair in zip(ALL_QUESTIONS, (each.tokens for each in answers), strict=True)]
            record |= {"evaluation": sum(rewards) / len(rewards), "solved": rewards.count(1.0) / len(rewards)}

        dice = random.Random(f"{training.seed} {step}")  # the same questions on every rank
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
            clip_grad_norm(model, training.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        records.append(record)
        if grid.global_rank == 0 and "evaluation" in record:
            print_line(" | ".join(f"{name} {value:.3g}" for name, value in record.items()))
    return records


def main() -> None:
    config = load_config(["--config", "examples/grpo.json", *sys.argv[1:]])
    check_world_size(config.distributed, int(os.environ.get("WORLD_SIZE", 1)))
    device = set_up_device(config)
    init_process_group(config, device)
    records = learn(config, device)
    if dist.get_rank() == 0:
        folder = Path(config.checkpoint.save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "rewards.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_error(main)
