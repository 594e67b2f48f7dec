"""set_up: a loop of one's own resumes, freezes parameters, stops, and numbers its samples."""

import contextlib
import functools
import gc
import math
import signal
import weakref
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import BatchEncoding, LlamaConfig

from conformance.case import sizes_of
from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import epoch_order
from picotron.optimizer import AdamW
from tests.support.examples import make_trainer, save_weights
from tests.support.memory import SavedBytes
from tests.support.oracle import (
    assert_close,
    make_config,
    oracle_model,
    random_rows,
    tiny_llama,
)
from workbench.own_loops.batches import cross_entropy
from workbench.own_loops.trainer import (
    Data,
    Trainer,
    fingerprint,
    gradient_norms,
    set_up,
    used_keys,
)
from workbench.run.launch import connect, exit_on_error
from workbench.run.ranks import run_ranks
from workbench.run.run_folder import claim_save_dir
from workbench.run.stop_signals import STOP_SIGNALS, StopSignals
from workbench.variants.experts import Experts


def config_of(folder: Path, layout: str = "", model: LlamaConfig | None = None, **keys: Any) -> Config:
    """Return the config of four steps of a model without a tokenizer."""
    save_weights(folder / "model", model or tiny_llama(), seed=42)
    keys = {"training__total_train_steps": 4, "training__warmup_steps": 2, "model__pretrained": True, **keys}
    return make_config(layout, model__name=str(folder / "model"), checkpoint__save_dir=str(folder / "run"), **keys)


def random_data(config: Config) -> Data:
    return Data("", None, random_rows(config))


def train_twice(*configs: Config) -> None:
    """Train in one process as in a notebook: with `set_up`, and again, and go on. A step has the batches of two, and
    the program changes weights after it.
    """
    handlers, losses = [signal.getsignal(each) for each in STOP_SIGNALS], []
    for config in configs:
        with set_up(config, random_data(config)) as trainer:
            read = trainer.next_batches
            for _ in trainer.steps():
                losses.append(trainer.train([*read(), *read()])["loss"])
                with torch.no_grad():
                    torch._foreach_mul_([*trainer.model.parameters()], 0.9)
            trainer.log({"step": trainer.progress.step, "accuracy": None})
    assert losses[:4] == losses[4:]
    assert len(set(losses)) == 4
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == handlers


def move_biases(config: Config) -> None:
    """Move the biases of routers, if these are not frozen, by the tokens of steps that were not given up."""
    for frozen in ("", "lm_head"):
        trainer = make_trainer(config, random_data(config), lambda name, part=frozen: part not in name)
        with pytest.raises(ZeroDivisionError):
            trainer.train(trainer.next_batches(), lambda *_: 1 / 0)  # type: ignore[arg-type]
        assert not any(each.load for each in trainer.model.modules() if isinstance(each, Experts))
        assert 1 <= trainer.train(trainer.next_batches())["expert_load"] <= 8
        biases = [p for name, p in trainer.model.named_parameters() if name.endswith("correction_bias")]
        assert any(bias.any() for bias in biases) != bool(frozen)


def test_biases_of_routers_move_in_own_loops(pool: WorkerPool, tmp_path: Path) -> None:
    keys = {"model__name": "docs/tiny-bias", "training__router_bias_rate": 0.1, "training__eval_frequency": 0}
    pool.run(move_biases, 1, make_config(checkpoint__save_dir=str(tmp_path), **keys))
    assert "training.router_bias_rate" in used_keys()


def train_two_experts(config: Config) -> list[float]:
    """Return the losses of two steps that train an expert of each ep rank, in different layers, and nothing else."""
    trained = "layers.1.mlp.experts.7.", "layers.2.mlp.experts.0."
    frozen = lambda name: not any(part in name for part in trained)  # noqa: E731
    trainer = make_trainer(config, random_data(config), frozen)
    return [trainer.train(trainer.next_batches())["loss"] for _ in range(2)]


def test_ep_ranks_that_train_different_experts_equal_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    keys = {"model__name": "docs/tiny-experts", "checkpoint__save_dir": str(tmp_path)}
    (alone,) = pool.run(train_two_experts, 1, make_config("m2", **keys))
    for found in pool.run(train_two_experts, 2, make_config("dp2 ep2", **keys)):
        assert_close(found, alone)


def saved_for_the_head(config: Config) -> int:
    """Return the bytes that a step saves for backward if it trains the head only."""
    trainer = make_trainer(config, random_data(config), lambda name: "lm_head" not in name)
    saved = SavedBytes(trainer.model)
    with saved.hooks():
        trainer.train(trainer.next_batches())
    return saved.peak


def test_frozen_experts_of_ep_ranks_save_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    keys = {"model__name": "docs/tiny-experts", "checkpoint__save_dir": str(tmp_path)}
    assert pool.run(saved_for_the_head, 2, make_config("dp2 ep2", **keys)) == [0, 0]


@pytest.mark.processes
def test_processes_set_up_one_run_after_the_other(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"layout": "dp2 bfloat16", "checkpoint__save_frequency": 2}
    half = config_of(tmp_path, **keys, training__max_tokens=2 * 4 * 16)
    rest, again = (config_of(tmp_path, **keys, checkpoint__load_path=path) for path in ("latest", ""))
    run_ranks(2, functools.partial(train_twice, half, rest, again))


def test_a_cell_that_has_failed_runs_again_and_frees_its_model(tmp_path: Path) -> None:
    config, models, handler = config_of(tmp_path), [], signal.getsignal(signal.SIGINT)
    for _ in range(3):
        with contextlib.suppress(EOFError), set_up(config, random_data(config)) as trainer:
            models.append(weakref.ref(trainer.model))
            assert not any(model() for model in models[:-2])  # although Python collects garbage seldom
            batches, numbers = trainer.next_batches(), []
            for _ in range(3):  # with samples of its own, whatever was read before
                numbers.append(str(trainer.next_samples(99)))
                trainer.train(batches)
            assert len(set(numbers)) == 3
            with pytest.raises(UserError, match="in a run already"), set_up(config, Data()):
                pass
            raise EOFError
    with pytest.raises(SystemExit), set_up(config, Data()) as trainer:
        trainer.stop = signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is handler
    del trainer
    exit_on_error(lambda: None)  # as in the cell of another run
    gc.collect()
    assert not any(model() for model in models)


def test_runs_of_one_process_leave_no_model_and_no_lock(tmp_path: Path) -> None:
    """One process calls the function `train` of train.py again and again."""
    config, models = config_of(tmp_path), []

    def train() -> None:
        claim_save_dir(config)
        trainer = Trainer(config, connect(config), random_data(config))
        trainer.train(trainer.next_batches())
        models.append(weakref.ref(trainer.model))
        dist.destroy_process_group()

    for _ in range(2):
        run_ranks(1, train)
    assert [model() for model in models] == [None, None]


def freeze_and_stop(config: Config) -> None:
    trainer = make_trainer(config, Data(), lambda name: "lm_head" not in name)
    assert [hasattr(p, "main_grad") for p in trainer.model.parameters()].count(True) == 1
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    batch = {"input_ids": torch.arange(32).view(2, 16), "target_ids": torch.arange(1, 33).view(2, 16)}
    for step in trainer.steps():
        record = trainer.train(trainer.split(batch), cross_entropy)
        assert record["step"] == step + 1
        StopSignals.received = signal.SIGTERM if step == 1 else 0
    changed = [name for name, parameter in trainer.model.named_parameters() if not parameter.equal(before[name])]
    assert [name.split(".")[-2] for name in changed] == ["lm_head"]
    assert (trainer.stop, trainer.progress.step) == (signal.SIGTERM, 2)
    StopSignals.received = 0
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    for loss_fn, message in (
        (lambda *args: (cross_entropy(*args), 1, {"grad_norm": 1.0}), "'grad_norm', which every record has"),
        (lambda *args: cross_entropy(*args) * math.nan, "step 3: loss is nan"),
    ):
        with pytest.raises(UserError, match=message):
            trainer.train(trainer.split(batch), loss_fn)
        assert not any(each.any() for each in trainer.model.gradient_buffers())
        assert all(parameter.equal(before[name]) for name, parameter in trainer.model.named_parameters())


def resume_with_other_states(config: Config) -> None:
    make_trainer(config, Data(), lambda name: "lm_head" not in name)
    for moments, message in ((AdamW.moments, "weight was frozen in"), (("exp_avg",), "but AdamW needs exp_avg;")):
        with mock.patch.object(AdamW, "moments", moments), pytest.raises(UserError, match=message):
            make_trainer(config, Data())


def test_frozen_parameters_stay_and_a_signal_ends_the_loop_with_a_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    keys = {"training__lr_scheduler": "constant", "training__warmup_steps": 0}
    pool.run(freeze_and_stop, 1, config_of(tmp_path, **keys))
    pool.run(resume_with_other_states, 2, config_of(tmp_path, "pp2", **keys, checkpoint__load_path="latest"))
    assert (tmp_path / "run" / "step_00000002" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "step_00000002" / "tokenizer.json").exists()


def numbers_of_samples(config: Config, larger: Config) -> list[int]:
    """Return the numbers of the samples of four steps, of which the third and the fourth have a larger batch."""
    trainer, found = make_trainer(config, Data()), []
    for each in (config, config, larger, larger):
        trainer.config = each
        found += trainer.next_samples(5, rows=2)
        trainer.progress = trainer.progress.after_step(each)
    return found


def test_each_sample_occurs_once_in_an_epoch_also_if_the_batch_changes(pool: WorkerPool, tmp_path: Path) -> None:
    sizes = [config_of(tmp_path, training__micro_batch_size=size) for size in (6, 8)]
    (found,) = pool.run(numbers_of_samples, 1, *sizes)
    assert found == [int(i) for epoch in range(3) for i in epoch_order(5, 42, epoch)][: 3 + 3 + 4 + 4]


def test_fingerprints_of_long_samples_differ(tmp_path: Path) -> None:
    config, tokens = config_of(tmp_path), torch.zeros(2, 2000, dtype=torch.long)
    tokens[1, 1000] = 1
    for kind in (dict, OrderedDict, UserDict, BatchEncoding):
        a, b = (fingerprint(config, [kind({"input_ids": row})]) for row in tokens)
        assert a != b
        assert a == fingerprint(config, [{"input_ids": tokens[0].tolist()}])
    for make in (lambda row: (row.numpy(),), lambda row: Data("", row)):
        assert fingerprint(config, [make(tokens[0])]) != fingerprint(config, [make(tokens[1])])


def data_of_its_own(config: Config) -> None:
    with pytest.raises(UserError, match="rank 1 has other data than rank 0"):
        make_trainer(config, Data(f"data of {dist.get_rank()}"))


def test_ranks_with_other_data_are_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(data_of_its_own, 2, config_of(tmp_path, "dp2"))


ROWS = {"input_ids": torch.arange(64).view(4, 16) ** 2 % 61, "target_ids": torch.arange(1, 65).view(4, 16) ** 2 % 61}


def norms_of_gradients(config: Config) -> dict[str, float]:
    trainer = make_trainer(config, Data())
    return trainer.train(trainer.split(ROWS), on_gradients=gradient_norms)


@pytest.mark.parametrize(
    "layout",
    [
        "tp4 sp",
        "pp2 dp2 zero1",
        "dp2 tp2 zero3",
    ],
)
def test_the_norms_of_gradients_are_those_of_the_unsharded_model(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    """The embedding is tied, two ranks share each key/value head, and the norms have replicas."""
    model = tiny_llama(tie_word_embeddings=True, num_attention_heads=8)
    config = config_of(tmp_path, layout, model, training__micro_batch_size=4 // sizes_of(layout)["dp"])
    oracle = oracle_model(model)
    F.cross_entropy(oracle(ROWS["input_ids"]).logits.flatten(0, 1), ROWS["target_ids"].flatten()).backward()
    expected = {name: p.grad.norm().item() for name, p in oracle.named_parameters() if p.grad is not None}
    for record in pool.run(norms_of_gradients, config.distributed.world_size, config):
        others = ("step", "loss", "grad_norm", "learning_rate")
        assert_close({name: record[name] for name in record if name not in others}, expected)
        assert_close(record["grad_norm"], math.sqrt(sum(norm**2 for norm in expected.values())))
