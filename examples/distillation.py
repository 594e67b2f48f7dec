"""Train a small model to predict as a large one:

    python -m examples.distillation --teacher DIR --model.name SMALL_DIR --dataset.name texts.jsonl

The loss is the mean over tokens of the Kullback-Leibler divergence between the teacher's and the student's predictions,
both at a temperature, times its square (Hinton et al. 2015, arXiv:1503.02531). Both models have the same tokenizer and
layout. Options are those of train.py. The defaults, examples/distillation.json, are for a pretrained model: a learning
rate of 2e-5, in float32. With --model.pretrained false, only the config.json in SMALL_DIR counts.
"""

import functools
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.model.cross_entropy import IGNORE_INDEX
from picotron.tensor_parallel.tp_communications import reduce_from_ranks
from workbench.console import number
from workbench.generation.prompts import Encoder
from workbench.own_loops.batches import Batch
from workbench.own_loops.trainer import DATA_SET_KEYS, FrozenModel, Trainer, run_program, set_up, used_keys
from workbench.prepare.tokens import read_tokenizer
from workbench.run.checkpoint.safetensors_folder import find_folder
from workbench.run.config_reader import config_parser, load_config
from workbench.run.model_config import load_model_config
from workbench.run.run_folder import check_kept
from workbench.run.token_files import check_tokenizer


def divergence(head: Any, x: Tensor, batch: Batch, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of all counted tokens, and their number.

    No rank holds all logits of a token: the tp ranks sum the terms of their shards of the vocabulary. The denominators
    of the two softmaxes are outside of this sum: inside, a rank would pass back only its own part of their gradients.
    """
    group = pgm.process_group_manager.tp_group

    def log_denominator(logits: Tensor) -> Tensor:
        top = logits.detach().amax(-1)  # keeps the exponentials small
        all_reduce(top, group, dist.ReduceOp.MAX)
        return reduce_from_ranks((logits - top[..., None]).exp().sum(-1), group).log() + top

    logits = (batch["teacher"], head.local_logits(x))  # (B, T/cp, V/tp)
    teacher, student = (each.to(accumulation_dtype(each)) / temperature for each in logits)
    of_teacher, of_student = log_denominator(teacher), log_denominator(student)  # (B, T/cp)
    probabilities = (teacher - of_teacher[..., None]).exp()
    difference = reduce_from_ranks((probabilities * (teacher - student)).sum(-1), group)
    losses = (difference + of_student - of_teacher) * temperature**2
    counted = batch["target_ids"] != IGNORE_INDEX  # not prompts
    return (losses * counted).sum(), counted.sum(), {}


def learn(trainer: Trainer, folder: str, temperature: float) -> None:
    teacher = FrozenModel(trainer.config, folder, trainer.device)
    sizes = [each.vocab_size for each in (teacher.model_config, trainer.model_config)]
    if sizes[0] != sizes[1]:
        raise UserError(f"the teacher has {sizes[0]} tokens, but the student {sizes[1]}; use models with one tokenizer")
    loss_fn = functools.partial(divergence, temperature=temperature)
    for _ in trainer.steps():
        batches = teacher.add_to(trainer.next_batches(), "teacher", lambda head, x, batch: head.local_logits(x))
        trainer.log(trainer.train(batches, loss_fn))


def read_config(arguments: list[str]) -> tuple[Config, str, float]:
    """Return the config of a command line, the folder of the teacher and the temperature."""
    parser = config_parser("Train with a teacher.", used_keys(DATA_SET_KEYS))
    parser.add_argument("--teacher", required=True, help="folder or hub id of the teacher")
    parser.add_argument("--temperature", type=number(float, 1e-3), default=2.0, help="divisor of the logits [2.0]")
    options, others = parser.parse_known_args(arguments)
    config = load_config(["--config", str(Path(__file__).with_suffix(".json")), *others])
    return config, options.teacher, options.temperature


def check_tokenizers(config: Config, teacher: str) -> None:
    """Raise a UserError if the teacher has a tokenizer, and the run tokenizes its data with another one."""
    folder, own = find_folder(teacher), config.model.tokenizer or config.model.name
    if not any(folder.glob("tokenizer*")):
        return
    if (of_data := Path(config.dataset.name, "tokenizer")).is_dir():  # token files
        return check_tokenizer(of_data, folder)
    problem = "would train a new tokenizer" if own == "bpe" else ""
    if not problem:
        vocabulary = read_tokenizer(config, load_model_config(config.model)).get_vocab()
        problem = "" if vocabulary == Encoder.read(folder).tokenizer.get_vocab() else "is not the teacher's tokenizer"
    if problem:
        raise UserError(f"the tokenizer {own!r} {problem}; set model.tokenizer to {teacher!r}")


def train(config: Config, teacher: str, temperature: float) -> None:
    """Train on this rank."""
    check_kept(config, {"--teacher": teacher})
    check_tokenizers(config, teacher)
    with set_up(config) as trainer:
        learn(trainer, teacher, temperature)


if __name__ == "__main__":
    run_program(read_config, train)
