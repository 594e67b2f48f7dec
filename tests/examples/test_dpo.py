"""examples/dpo.py: records and weights are those of the paper's formula with transformers' model, in every layout."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from conformance.worker_pool import WorkerPool
from examples.dpo import learn, read_config, read_pairs
from picotron.config import Config
from picotron.console import UserError
from tests.fuzz.chat_templates import CHATML
from tests.support.examples import load, log_probs, make_trainer, results, save_model, train_reference, words
from tests.support.oracle import assert_close
from tests.support.samples import marked, with_template, write_jsonl
from workbench.own_loops.trainer import Data, fingerprint
from workbench.prepare.tokens import tokenizer_folder

BETA, LENGTH = 0.3, 24
PAIRS = [
    {"prompt": "What is 2 + 2?", "chosen": " It is 4.", "rejected": " It is 2 + 2, is it?"},
    {"prompt": "def f(x):\n", "chosen": "    return x + 1\n", "rejected": "    x\n"},
    {"prompt": "def g(x):\n", "chosen": "    return x", "rejected": " user user user"},
    {"prompt": "What is it?", "chosen": " It", "rejected": ""},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model and with pairs: one global batch."""
    folder = tmp_path_factory.mktemp("dpo")
    save_model(folder / "model")
    write_jsonl(folder / "pairs.jsonl", PAIRS)
    return folder


def config_of(folder: Path, save_dir: Path, layout: str, **keys: Any) -> Config:
    keys = {"dataset__name": folder / "pairs.jsonl", "training__seq_length": LENGTH, **keys}
    keys |= {"model__name": folder / "model", "checkpoint__save_dir": save_dir, "training__total_train_steps": 3}
    keys |= {"training__learning_rate": 5e-4}
    config, beta = read_config([*words(layout, 2 * len(PAIRS), **keys), "--beta", str(BETA)])
    assert beta == BETA
    return config


def train(config: Config) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    pairs = read_pairs(config, tokenizer)
    trainer = make_trainer(config, Data(fingerprint(config, pairs), tokenizer_folder(tokenizer)))
    learn(trainer, pairs, BETA)
    return results(trainer)


def expected(config: Config) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train with transformers' model, torch's AdamW and equation 7 of the paper. Returns records and weights."""
    model, reference = (load(config.model.name) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)

    def statistics() -> dict[str, Tensor]:
        rewards = []
        for pair in PAIRS:
            for answer in ("chosen", "rejected"):
                texts = pair["prompt"], pair[answer]
                new, old = (log_probs(each, tokenizer, *texts).sum() for each in (model, reference))
                rewards.append(BETA * (new - old.detach()))
        chosen, rejected = torch.stack(rewards).view(-1, 2).T
        margin = chosen - rejected
        numbers = {"loss": -F.logsigmoid(margin), "margin": margin, "accuracy": margin > 0}
        return numbers | {"rewards/chosen": chosen, "rewards/rejected": rejected}

    return train_reference(model, config.training, 3, statistics)


def test_records_and_weights_are_those_of_the_paper_with_transformers(
    pool: WorkerPool, folder: Path, tmp_path: Path
) -> None:
    """A run that resumes after two of three steps has the same reference."""
    for end in (2, 3):
        keys: dict[str, Any] = {"training__max_tokens": end * 8 * LENGTH, "checkpoint__load_path": "latest"}
        config = config_of(folder, tmp_path / "run", "pp2 cp2", checkpoint__save_frequency=2, **keys)
        records, weights = pool.run(train, config.distributed.world_size, config)[0]
        assert len(records) == end
    expected_records, expected_weights = expected(config)
    for name in expected_records[0]:
        assert_close([record[name] for record in records], [record[name] for record in expected_records], what=name)
    assert records[0]["margin"] == 0
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[2]["accuracy"] > 0.5
    assert_close(weights, expected_weights)


def pairs_of(folder: Path, tmp_path: Path, records: list[Any], length: int) -> list[list[str]]:
    """Read pairs with a tokenizer that has a chat template. Returns the text of the chosen and the rejected answer with
    the prompt; what counts is in [[ ]].
    """
    shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(with_template(str(tmp_path / "model"), CHATML))
    path = write_jsonl(tmp_path / "pairs.jsonl", records)
    config = config_of(folder, tmp_path, "", dataset__name=path, training__seq_length=length)
    return [
        [marked(tokenizer, [*ids, targets[-1]], [False, *(target >= 0 for target in targets)]) for ids, targets in pair]
        for pair in read_pairs(config, tokenizer)
    ]


U, A = (lambda text: {"role": "user", "content": text}), (lambda text: {"role": "assistant", "content": text})
QUESTION, ASKED = [U("What?")], "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = {"chosen": [A("is 2")], "rejected": [A("is it")]}
WHOLE = {name: QUESTION + answer for name, answer in ANSWERS.items()}
OPENAI = {"preferred_output": ANSWERS["chosen"], "non_preferred_output": ANSWERS["rejected"]}
TURNS = {"prompt": [*QUESTION, A("It"), *QUESTION], "chosen": [A("is"), *WHOLE["chosen"]], "rejected": [A("is it")]}
SHAPES = [  # records of the same pair, the text before its answers, and the answers
    (
        [
            *({"prompt": QUESTION, **each} for each in (ANSWERS, WHOLE)),
            *({"messages": QUESTION, **ANSWERS}, WHOLE, {"input": {"messages": QUESTION}, **OPENAI}),
        ],
        ASKED,
        ["is 2<|im_end|>\n", "is it<|im_end|>\n"],
    ),
    (
        [TURNS],
        f"{ASKED}It<|im_end|>\n{ASKED}",
        [f"is<|im_end|>\n]]{ASKED}[[is 2<|im_end|>\n", "is it<|im_end|>\n"],
    ),
    ([{"prompt": "What?", "chosen": " 2", "rejected": " it"}], "What?", [" 2<|endoftext|>", " it<|endoftext|>"]),
    (
        [{"chosen": "What? 2", "rejected": "What? it"}],
        "<|endoftext|>What?",
        [" 2<|endoftext|>", " it<|endoftext|>"],
    ),
]


@pytest.mark.parametrize(("records", "prompt", "answers"), SHAPES)
def test_turns_of_the_answers_count_in_all_shapes_of_trl_and_openai(
    folder: Path, tmp_path: Path, records: list[Any], prompt: str, answers: list[str]
) -> None:
    pairs = pairs_of(folder, tmp_path, records, 120)
    assert pairs == [[f"{prompt}[[{answer}]]" for answer in answers]] * len(records)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: there should be a prompt, chosen and rejected"),
        ({"prompt": [U("a")], "chosen": [U("b"), A("c")], "rejected": [A("b")]}, "should begin with"),
        ({"prompt": "a" * 999, "chosen": "b", "rejected": "c"}, "of 1 pairs in .*, 1 are too long"),
    ],
)
def test_mistakes_in_the_pairs(folder: Path, tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pairs_of(folder, tmp_path, [record], LENGTH)
