"""Train on preferences:  torchrun --nproc_per_node 2 -m examples.dpo --model.name DIR --dataset.name pairs.jsonl

Each line of the file has a "prompt" and two answers, "chosen" and "rejected": three texts, or three lists of messages
for the tokenizer's chat template. Direct Preference Optimization (DPO, Rafailov et al. 2023, arXiv:2305.18290) makes
the chosen answer likelier than the rejected one, compared with a reference: the model in DIR, where training begins.

Options are those of train.py, and --beta; the config is examples/dpo.json. `--checkpoint.load_path latest` resumes.
"""

import functools
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from picotron.batches import Batch, sum_over_sequence
from picotron.command_line import config_parser, load_config
from picotron.config import Config
from picotron.console import UserError, number
from picotron.data.documents import load_documents
from picotron.data.samples import Sample, SampleEncoder, tools_of
from picotron.data.tokens import convert, read_tokenizer, tokenizer_folder
from picotron.model.llama import IGNORE_INDEX
from picotron.parallelize import check_run
from picotron.run.launch import exit_on_error, set_up_logging
from picotron.trainer import Data, FrozenModel, Trainer, check_used, fingerprint, set_up, used_keys

logger = logging.getLogger("picotron")

Row = tuple[list[int], list[int]]  # inputs and targets
FIELDS = ("prompt", "chosen", "rejected")


def read_pairs(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Row, Row]]:
    """Return two rows for each pair that is not too long: the prompt with the chosen and with the rejected answer."""

    @functools.cache
    def encoder(answer: str, is_text: bool) -> SampleEncoder:
        text = {"prompt_column": "prompt", "completion_column": answer}
        return SampleEncoder(text if is_text else {"messages_column": answer}, tokenizer, np.int64)

    def row(record: dict[str, Any], answer: str) -> Row:
        is_text, prompt = isinstance(record[answer], str), record["prompt"]
        if not is_text:
            if not any(isinstance(each, dict) and each.get("role") == "assistant" for each in record[answer]):
                raise UserError(f"{answer} has no message with the role 'assistant'; correct or remove the record")
            record = record | {answer: prompt + record[answer]}
        (sample,) = encoder(answer, is_text).convert(record)
        if not is_text and prompt:
            sample = without_turns_of(tokenizer.apply_chat_template(prompt, tools_of(record), tokenize=False), sample)
        tokens, counted, _ = encoder(answer, is_text).encode([sample]).values()
        return tokens[:-1].tolist(), np.where(counted[1:], tokens[1:], IGNORE_INDEX).tolist()

    def pair(record: Any) -> Iterator[tuple[Row, Row]]:
        kinds = {type(record.get(name)) for name in FIELDS} if isinstance(record, dict) else {None}
        if kinds not in ({str}, {list}):
            raise UserError("there should be a prompt, chosen and rejected: three texts, or three lists of messages")
        yield row(record, "chosen"), row(record, "rejected")

    found = [each for record in load_documents(config.dataset, columns={}).records() for each in convert(record, pair)]
    pairs = [each for each in found if all(len(ids) <= config.training.seq_length for ids, _ in each)]
    if not pairs:
        raise UserError(
            f"none of the {len(found)} pairs in {config.dataset.name} fits into training.seq_length="
            f"{config.training.seq_length}; use more data or a longer seq_length"
        )
    logger.info("%d pairs in %s, %d of them are too long", len(found), config.dataset.name, len(found) - len(pairs))
    return pairs


def without_turns_of(prompt: str, sample: Sample) -> Sample:
    """Return a sample that begins with a prompt, such that the loss counts no turns of the assistant in the prompt."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sample.text, prompt, strict=False))
    begin = sum(1 for _ in equal)  # a template may end a prompt otherwise if no message follows
    return sample._replace(counted=[(start, end) for start, end in sample.counted if end > begin])


def batch_of(pairs: list[tuple[Row, Row]], length: int) -> Batch:
    """Return a global batch, in which the rows of a pair are neighbours."""
    ids, targets = (
        torch.zeros(2 * len(pairs), length, dtype=torch.int64),
        torch.full((2 * len(pairs), length), IGNORE_INDEX),
    )
    for i, (inputs, outputs) in enumerate(row for pair in pairs for row in pair):
        ids[i, : len(inputs)], targets[i, : len(outputs)] = torch.tensor(inputs), torch.tensor(outputs)
    return {"input_ids": ids, "target_ids": targets}


def log_probs_of_answers(head: Any, x: Tensor, batch: Batch) -> Tensor:
    """Compute the log-probability of each row's answer, (B,), equal on all cp ranks."""
    return sum_over_sequence(head.log_probs(x, batch["target_ids"]))


def preference_loss(head: Any, x: Tensor, batch: Batch, beta: float) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Compute equation 7 of the paper: the sum over pairs of -log sigmoid(margin), the number of pairs, and statistics.
    The margin is the difference of two rewards, beta log(pi(answer) / pi_ref(answer)).
    """
    rewards = beta * (log_probs_of_answers(head, x, batch) - batch["reference"])
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    margin = chosen - rejected
    return -F.logsigmoid(margin).sum(), len(margin), {"margin": margin.sum(), "accuracy": (margin > 0).sum()}


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
    parser = config_parser("Train on preferences.", used_keys())
    text = "strength of the tie to the reference model [0.1]"
    parser.add_argument("--beta", type=number(float, 0), default=0.1, help=text)
    options, others = parser.parse_known_args(arguments)
    config = load_config(["--config", "examples/dpo.json", *others], check_run)
    check_used(config)
    if not config.model.pretrained:
        raise UserError("model.pretrained=false, but DPO starts from a trained model; set it to true")
    if config.training.micro_batch_size % 2:
        size = config.training.micro_batch_size
        raise UserError(
            f"training.micro_batch_size={size} is odd, but pairs are two rows of a micro-batch; use an even one"
        )
    return config, options.beta


def main() -> None:
    set_up_logging()
    config, beta = read_config(sys.argv[1:])
    model_config, _ = check_run(config)
    tokenizer = read_tokenizer(config, model_config)
    pairs = read_pairs(config, tokenizer)
    with set_up(config, Data(fingerprint(config, pairs), tokenizer_folder(tokenizer))) as trainer:
        learn(trainer, pairs, beta)


if __name__ == "__main__":
    exit_on_error(main)
