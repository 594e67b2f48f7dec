"""Train on preferences:  python -m examples.dpo --model.name DIR --dataset.name pairs.jsonl

Each line of the file has a "prompt" and two answers, "chosen" and "rejected": three texts, or three lists of messages
for the tokenizer's chat template; OpenAI's format, with "preferred_output", is also read. Direct Preference
Optimization (DPO, Rafailov et al. 2023, arXiv:2305.18290) makes the chosen answer likelier than the rejected one,
compared with a reference: the model in DIR, where training begins.

Options are those of train.py, and --beta. The defaults, examples/dpo.json, are for a pretrained model: a learning rate
of 1e-6, in float32. A much higher one destroys the model, while the accuracy rises to 1: `rewards/chosen` and
`rewards/rejected` then both fall. `--checkpoint.load_path latest` resumes.
"""

import functools
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from picotron.config import Config
from picotron.console import UserError
from picotron.model.cross_entropy import IGNORE_INDEX
from workbench.console import number
from workbench.generation.prompts import prompt_in
from workbench.own_loops.batches import Batch, sum_over_sequence
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
from workbench.prepare.conversations import messages_of
from workbench.prepare.documents import WEIGHT, load_documents
from workbench.prepare.samples import SampleEncoder
from workbench.prepare.tokens import convert, read_tokenizer, tokenizer_folder
from workbench.run.config_reader import config_parser, load_config

logger = logging.getLogger("picotron")

Row = tuple[list[int], list[int]]  # inputs and targets
ANSWERS = ("chosen", "rejected")
TYPES = [(str, str, str), (list, list, list), (type(None), str, str), (type(None), list, list), (str, list, list)]


def read_pairs(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Row, Row]]:
    """Return two rows for each pair, the prompt with the chosen and with the rejected answer. Pairs that are too long,
    or whose answers are equal, are left out.
    """

    @functools.cache
    def encoder_of(**columns: str) -> SampleEncoder:
        return SampleEncoder(columns, tokenizer, np.int64)

    def row(sample: dict[str, Any]) -> Row:
        texts = {"prompt_column": "prompt", "completion_column": "completion"}
        encoder = encoder_of(**({"messages_column": "messages"} if "messages" in sample else texts))
        samples = [*encoder.convert(sample)]
        if len(samples) != 1:
            raise UserError(
                "the chat template changes earlier turns of the assistant, so an answer can have only one; remove the record"
            )
        tokens, counted, _ = encoder.encode(samples).values()
        return tokens[:-1].tolist(), np.where(counted[1:], tokens[1:], IGNORE_INDEX).tolist()

    def pair(record: Any) -> Iterator[tuple[Row, Row]]:
        if isinstance(record, dict) and isinstance(record.get("input"), dict):  # OpenAI's format
            answers = {"chosen": record.get("preferred_output"), "rejected": record.get("non_preferred_output")}
            record = record["input"] | answers
        chosen, rejected = map(row, samples_of(record))
        if isinstance(record["chosen"], str) and not prompt_in(record):  # then the answers begin with the prompt
            equal = itertools.takewhile(lambda ids: ids[0] == ids[1], zip(chosen[0], rejected[0], strict=False))
            shared = [IGNORE_INDEX for _ in equal][1:]
            chosen[1][: len(shared)] = rejected[1][: len(shared)] = shared
        yield chosen, rejected

    documents = load_documents(config.dataset, config.training.num_samples, config.training.seed, columns={})
    found = [each for record in documents.records() for each in convert(record, pair)]
    short = [each for each in found if all(len(ids) <= config.training.seq_length for ids, _ in each)]
    pairs = [(chosen, rejected) for chosen, rejected in short if chosen != rejected]
    left_out = f"{len(found) - len(short)} are too long, and {len(short) - len(pairs)} have equal answers"
    if not pairs:
        remedy = "a longer training.seq_length" if len(short) < len(found) else "other data"
        raise UserError(f"of {len(found)} pairs in {documents.name}, {left_out}, so none is left; use {remedy}")
    logger.info("%d pairs in %s, of which %s", len(found), documents.name, left_out)
    return pairs


def samples_of(record: Any) -> list[dict[str, Any]]:
    """Return the samples of a pair, with the chosen and with the rejected answer. As in TRL, the prompt of messages may
    be a text, and answers may begin with the prompt, which may then be missing.
    """
    fields: list[Any] = [prompt_in(record), *map(record.get, ANSWERS)] if isinstance(record, dict) else [None] * 3
    prompt: Any
    answers: list[Any]
    prompt, *answers = (messages_of(each) if isinstance(each, list) else each for each in fields)
    if None in answers or tuple(map(type, (prompt, *answers))) not in TYPES:
        messages = 'messages with the texts "role" and "content"'
        raise UserError(f"there should be a prompt, chosen and rejected: three texts, or three lists of {messages}")
    if isinstance(answers[0], str):
        return [{"prompt": prompt or "", "completion": answer} for answer in answers]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if all(answer and answer[0]["role"] == "assistant" for answer in answers):
        answers = [prompt + answer for answer in answers]
    elif any(message not in answer for message in prompt for answer in answers):
        raise UserError("chosen and rejected should begin with a message of the assistant, or with the prompt")
    before_last = (answer[:-1] for answer in answers)
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*before_last, strict=False))
    shared = [message | {WEIGHT: 0} for message, _ in equal]  # turns of the prompt, which are no answers
    return [record | {"messages": shared + answer[len(shared) :]} for answer in answers]


def batch_of(pairs: list[tuple[Row, Row]], length: int) -> Batch:
    """Return a global batch, in which the rows of a pair are neighbours."""
    rows = [row for pair in pairs for row in pair]
    ids, targets = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), IGNORE_INDEX)
    for i, (inputs, outputs) in enumerate(rows):
        ids[i, : len(inputs)], targets[i, : len(outputs)] = torch.tensor(inputs), torch.tensor(outputs)
    return {"input_ids": ids, "target_ids": targets}


def log_probs_of_answers(head: Any, x: Tensor, batch: Batch) -> Tensor:
    """Compute the log-probability of each row's answer, (B,), equal on all cp ranks."""
    return sum_over_sequence(log_probs(head, x, batch["target_ids"]))


def preference_loss(head: Any, x: Tensor, batch: Batch, beta: float) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Compute equation 7 of the paper: the sum over pairs of -log sigmoid(margin), the number of pairs, and statistics.
    The margin is the difference of two rewards, beta log(pi(answer) / pi_ref(answer)), which have TRL's names.
    """
    rewards = beta * (log_probs_of_answers(head, x, batch) - batch["reference"])
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    margin = chosen - rejected
    statistics = {"margin": margin, "accuracy": margin > 0, "rewards/chosen": chosen, "rewards/rejected": rejected}
    return -F.logsigmoid(margin).sum(), len(margin), {name: each.sum() for name, each in statistics.items()}


def learn(trainer: Trainer, pairs: list[tuple[Row, Row]], beta: float) -> None:
    """Train on all steps of the run. The reference stays as it is, next to the model that learns."""
    config = trainer.config
    reference = FrozenModel(config, config.model.name, trainer.device)
    loss_fn = functools.partial(preference_loss, beta=beta)
    for _ in trainer.steps():
        numbers = trainer.next_samples(len(pairs), rows=2)
        batches = trainer.split(batch_of([pairs[i] for i in numbers], config.training.seq_length))
        batches = reference.add_to(batches, "reference", log_probs_of_answers)
        trainer.log(trainer.train(batches, loss_fn))


def read_config(arguments: list[str]) -> tuple[Config, float]:
    """Return the config of a command line, and beta."""
    parser = config_parser("Train on preferences.", used_keys(RECORD_KEYS))
    text = "strength of the tie to the reference model [0.1]"
    parser.add_argument("--beta", type=number(float, 1e-6), default=0.1, help=text)
    options, others = parser.parse_known_args(arguments)
    config = load_config(["--config", str(Path(__file__).with_suffix(".json")), *others])
    check_used(config, RECORD_KEYS)
    if not config.model.pretrained:
        raise UserError("model.pretrained=false, but DPO starts from a trained model; set it to true")
    if (size := config.training.micro_batch_size) % 2:
        raise UserError(
            f"training.micro_batch_size={size} is odd, but pairs are two rows of a micro-batch; use an even one"
        )
    return config, options.beta


def train(config: Config, beta: float) -> None:
    """Train on this rank."""
    model_config, _ = check_run(config)
    tokenizer = read_tokenizer(config, model_config)
    pairs = read_pairs(config, tokenizer)
    with set_up(config, Data(fingerprint(config, pairs), tokenizer_folder(tokenizer))) as trainer:
        learn(trainer, pairs, beta)


if __name__ == "__main__":
    run_program(read_config, train)
