"""examples/dpo.py: records and weights are those of the paper's formula with transformers' model, in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from conformance.fuzz.chat_templates import CHATML
from conformance.worker_pool import WorkerPool
from examples.dpo import batch_of, learn, read_config, read_pairs
from picotron.config import Config
from picotron.console import UserError
from tests.support.examples import make_trainer, results, save_model, words
from tests.support.oracle import assert_close, with_exact_norms
from tests.support.samples import messages, with_template, write_jsonl
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


def config_of(folder: Path, save_dir: Path, layout: dict[str, int], steps: int = 3, **keys: Any) -> Config:
    keys = {"dataset__name": folder / "pairs.jsonl", "training__seq_length": LENGTH, **keys}
    keys |= {
        "training__learning_rate": 5e-4,
        "training__warmup_steps": 0,
        "training__lr_scheduler": "constant",
        "model__name": folder / "model",
    }
    keys |= {"checkpoint__save_dir": save_dir, "training__total_train_steps": steps}
    config, beta = read_config([*words(layout, 2 * len(PAIRS), **keys), "--beta", str(BETA)])
    assert beta == BETA
    return config


def train(config: Config) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    pairs = read_pairs(config, tokenizer)
    trainer = make_trainer(config, Data(fingerprint(config, pairs), tokenizer_folder(tokenizer)))
    learn(trainer, pairs, BETA)
    return results(trainer)


def log_prob(model: LlamaForCausalLM, tokenizer: Any, prompt: str, answer: str) -> Tensor:
    """Return the log-probability of an answer with its end token: one text, one model, no padding."""
    text = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids = torch.tensor([*text["input_ids"], tokenizer.eos_token_id])
    first = sum(end <= len(prompt) for _, end in text["offset_mapping"])
    log_probs = model(ids[None, :-1]).logits[0].log_softmax(-1)
    return log_probs[range(first - 1, len(ids) - 1), ids[first:]].sum()


def expected(config: Config) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train with transformers' model, torch's AdamW and equation 7 of the paper. Returns records and weights."""
    model, reference = (
        with_exact_norms(LlamaForCausalLM.from_pretrained(config.model.name, dtype=torch.float64)) for _ in range(2)
    )
    tokenizer, training = AutoTokenizer.from_pretrained(config.model.name), config.training
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, (training.adam_beta1, training.adam_beta2), training.adam_eps, 0.0
    )
    records = []
    for _ in range(training.total_train_steps):
        rewards = []
        for pair in PAIRS:
            gains = [
                log_prob(model, tokenizer, pair["prompt"], pair[answer])
                - log_prob(reference, tokenizer, pair["prompt"], pair[answer]).detach()
                for answer in ("chosen", "rejected")
            ]
            rewards.append(BETA * torch.stack(gains))
        chosen, rejected = torch.stack(rewards).T
        loss = -F.logsigmoid(chosen - rejected).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        margin = chosen - rejected
        numbers = {"loss": loss, "margin": margin, "accuracy": (margin > 0).double()}
        numbers |= {"rewards/chosen": chosen, "rewards/rejected": rejected}
        records.append({name: number.mean().item() for name, number in numbers.items()})
    return records, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_records_and_weights_are_those_of_the_paper_with_transformers(
    pool: WorkerPool, folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder, tmp_path / "run", {"pp_size": 2, "cp_size": 2}, checkpoint__save_frequency=3)
    records, weights = pool.run(train, config.distributed.world_size, config)[0]
    expected_records, expected_weights = expected(config)
    for name in expected_records[0]:
        assert_close([record[name] for record in records], [record[name] for record in expected_records], what=name)
    assert records[0]["margin"] == 0
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[2]["accuracy"] > 0.5
    for name, weight in expected_weights.items():
        assert_close(weights[name], weight, what=name)


def test_a_resumed_run_continues_with_the_same_reference(pool: WorkerPool, folder: Path, tmp_path: Path) -> None:
    def config(name: str, **keys: Any) -> Config:
        return config_of(folder, tmp_path / name, {}, checkpoint__save_frequency=2, **keys)

    whole = pool.run(train, 1, config("whole"))[0][0]
    assert len(pool.run(train, 1, config("half", training__max_tokens=2 * 8 * LENGTH))[0][0]) == 2
    assert pool.run(train, 1, config("half", checkpoint__load_path="latest"))[0][0] == whole


def test_conversations_count_the_turns_of_the_answer_only(folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(with_template(str(tmp_path), CHATML))
    prompt = messages([("user", "What is 2 + 2?"), ("assistant", "It is 4."), ("user", "user?")])
    chosen = messages([("assistant", "is"), ("user", "What?"), ("assistant", "It")])
    rejected = messages([("assistant", "What")])
    path = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": prompt, "chosen": chosen, "rejected": rejected}])
    config = config_of(folder, tmp_path, {}, dataset__name=path, training__seq_length=120)
    batch = batch_of(read_pairs(config, tokenizer), 120)
    before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    for row, answer in enumerate((chosen, rejected)):
        text = tokenizer.apply_chat_template(prompt + answer, tokenize=False)
        inputs, targets = batch["input_ids"][row], batch["target_ids"][row]
        ids = tokenizer(text)["input_ids"]
        assert inputs[: len(ids) - 1].tolist() == ids[:-1]
        counted = text.removeprefix(before).replace("<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n", "")
        assert tokenizer.decode(targets[targets != -100]) == counted


U, A = (lambda text: {"role": "user", "content": text}), (lambda text: {"role": "assistant", "content": text})
SHAPES: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"prompt": [U("What?")], "chosen": [A("is 2")], "rejected": [A("is it")]},
        {"prompt": [U("What?")], "chosen": [U("What?"), A("is 2")], "rejected": [U("What?"), A("is it")]},
        {"messages": [U("What?")], "chosen": [A("is 2")], "rejected": [A("is it")]},
        {"chosen": [U("What?"), A("is 2")], "rejected": [U("What?"), A("is it")]},
        {"input": {"messages": [U("What?")]}, "preferred_output": [A("is 2")], "non_preferred_output": [A("is it")]},
    ],
    "texts": [
        {"prompt": "What?", "chosen": " 2", "rejected": " it"},
        {"chosen": "What? 2", "rejected": "What? it"},
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_of_trl_and_openai_are_the_same_pair(folder: Path, tmp_path: Path, shape: str) -> None:
    save_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(with_template(str(tmp_path), CHATML))
    path = write_jsonl(tmp_path / "pairs.jsonl", SHAPES[shape])
    pairs = read_pairs(config_of(folder, tmp_path, {}, training__seq_length=90, dataset__name=path), tokenizer)
    assert len(pairs) == len(SHAPES[shape])
    before, end = ("", "<|endoftext|>") if shape == "texts" else ("is", "<|im_end|>\n")
    for rows in pairs:
        assert shape == "texts" or rows == pairs[0]  # a text without a prompt begins with the end-of-sequence token
        for (ids, targets), answer in zip(rows, (" 2", " it"), strict=True):
            assert tokenizer.decode([token for token in targets if token >= 0]) == before + answer + end
            assert tokenizer.decode(ids).count("What?") == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: there should be a prompt, chosen and rejected"),
        ({"prompt": [U("a")], "chosen": [U("b"), A("c")], "rejected": [A("b")]}, "should begin with"),
        ({"prompt": "a" * 999, "chosen": "b", "rejected": "c"}, "of 1 pairs in .*, 1 are too long"),
    ],
)
def test_mistakes_in_the_pairs(folder: Path, tmp_path: Path, record: Any, message: str) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record) + "\n")
    config = config_of(folder, tmp_path, {}, dataset__name=tmp_path / "pairs.jsonl")
    with pytest.raises(UserError, match=message):
        read_pairs(config, AutoTokenizer.from_pretrained(folder / "model"))
