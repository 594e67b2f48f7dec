"""examples/distillation.py: loss and weights are those of transformers' models and torch's divergence."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.worker_pool import WorkerPool
from examples import distillation
from examples.distillation import check_tokenizers, learn, read_config
from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import TextRows
from tests.support.examples import load, make_trainer, results, save_model, train_reference, words
from tests.support.oracle import assert_close
from workbench.own_loops.trainer import Data
from workbench.prepare.tokens import train_bpe

ROWS, LENGTH, TEMPERATURE = 8, 16, 3.0


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(300, size=ROWS * LENGTH + 1).astype(np.uint16)


def train(config: Config, teacher: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer = make_trainer(config, Data("", None, TextRows(tokens(), LENGTH)))
    learn(trainer, teacher, TEMPERATURE)
    return results(trainer)


def config_of(folder: Path, layout: str) -> Config:
    keys = {"checkpoint__save_dir": folder / "run", "training__seq_length": LENGTH, "training__total_train_steps": 2}
    keys |= {"training__weight_decay": 0, "model__name": folder / "student", "dataset__name": "python-stdlib"}
    config, _, _ = read_config(["--teacher", "none", *words(layout, ROWS, **keys)])
    return config


def test_losses_and_weights_are_those_of_transformers(pool: WorkerPool, tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", seed=1, num_hidden_layers=4, hidden_size=48)
    save_model(tmp_path / "student")
    config = config_of(tmp_path, "tp2 cp2")
    records, weights = pool.run(train, config.distributed.world_size, config, str(tmp_path / "teacher"))[0]

    student, teacher = (load(tmp_path / name) for name in ("student", "teacher"))
    ids = torch.from_numpy(tokens()[:-1].astype(np.int64)).view(ROWS, LENGTH)

    def statistics() -> dict[str, Tensor]:
        ours, theirs = ((model(ids).logits / TEMPERATURE).log_softmax(-1).flatten(0, 1) for model in (student, teacher))
        return {"loss": F.kl_div(ours, theirs.detach(), reduction="batchmean", log_target=True) * TEMPERATURE**2}

    expected, expected_weights = train_reference(student, config.training, 2, statistics)
    assert_close([record["loss"] for record in records], [record["loss"] for record in expected])
    assert_close(weights, expected_weights)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Two tokenizers of the same size, of which one was trained on other texts."""
    save_model(tmp_path / "teacher")
    save_model(tmp_path / "student")
    config, teacher, other = config_of(tmp_path, ""), str(tmp_path / "teacher"), str(tmp_path / "other")
    train_bpe(iter(["wholly other words and letters, 0 to 9"] * 9), 300).save_pretrained(other)

    def check(tokenizer: str) -> None:
        model = config.model.model_copy(update={"tokenizer": tokenizer})
        check_tokenizers(config.model_copy(update={"model": model}), teacher)

    check(teacher)
    with pytest.raises(UserError, match=r"set model\.tokenizer to '.*teacher'"):
        check(other)


def test_a_teacher_that_the_run_would_move_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "run" / "step_00000002").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--teacher=.* is in checkpoint\.save_dir"):
        distillation.train(config_of(tmp_path, ""), str(folder), TEMPERATURE)
