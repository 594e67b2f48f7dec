"""Training in float16: `torch.amp.GradScaler` and transformers on one process, and the same in every layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from picotron.optimizer import learning_rate_factor
from tests.support.checkpoints import BATCH, run_config, train
from tests.support.oracle import our_model, random_tokens, relative_error, tiny_llama, torch_adamw
from tests.support.training import wrapped
from workbench.run.checkpoint.checkpoint import read_state
from workbench.variants.choose import make_optimizer
from workbench.variants.float16 import LossScale

STEPS, START, INTERVAL = 26, 2.0**23, 12  # gradients overflow with this scale, and again when it has grown


def config_of(folder: Path, layout: str = "", **changes: Any) -> Config:
    keys = {"training__total_train_steps": STEPS, "training__learning_rate": 3e-3}
    keys |= {"training__adam_eps": 1e-2}  # so that updates depend on the size of gradients
    return run_config(folder, f"{layout} float16", **keys | changes)


def with_scale(config: Config) -> dict[str, Any]:
    """Train with the scale of this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScale.__init__, "__defaults__", (START, INTERVAL, 0, 0))
        return train(config, tiny_llama())


def with_grad_scaler(config: Config) -> dict[str, Any]:
    """Train transformers' model in float16, with torch's loss scaling and float32 master weights."""
    training = config.training
    model = AutoModelForCausalLM.from_config(tiny_llama()).half()
    model.load_state_dict(our_model(tiny_llama(), torch.float16, training.seed).state_dict())
    masters = {p: torch.nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = torch_adamw(masters.values(), training)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(training))
    # A data-parallel rank's gradients are those of its mean loss, and thus larger by the number of ranks.
    ranks = config.distributed.dp_size * config.distributed.cp_size
    scaler = torch.amp.GradScaler("cpu", init_scale=ranks * START, growth_interval=INTERVAL)
    rows = torch.from_numpy(random_tokens().astype("int64")).unfold(0, 17, 16)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for part in rows[step * BATCH : (step + 1) * BATCH].chunk(2):
            logits = model(part[:, :-1], use_cache=False).logits.float()
            loss = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / 2
            scaler.scale(loss).backward()
            total += loss.item()
        for p, master in masters.items():
            master.grad, p.grad = p.grad.float(), None
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), training.max_grad_norm).item())
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        for p, master in masters.items():
            p.data.copy_(master.data)
        losses.append(total)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "grad_norms": norms, "weights": weights}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # torch skips the first update
@pytest.mark.parametrize("layout", ["cp2 zero3", "pp2 tp2 sp zb_h1"])
def test_every_layout_trains_as_torch_with_its_grad_scaler(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    config = config_of(tmp_path, layout)
    ours, theirs = pool.run(with_scale, config.distributed.world_size, config)[0], with_grad_scaler(config)
    overflows = [not math.isfinite(norm) for norm in theirs["grad_norms"]]
    assert sum(overflows) >= 7
    assert [norm == 0 for norm in ours["grad_norms"]] == overflows
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
    for name, weight in theirs["weights"].items():
        assert relative_error(ours["weights"][name].float(), weight.float()) < 2e-2, name


def test_a_resumed_run_goes_on_with_its_scale(pool: WorkerPool, tmp_path: Path) -> None:
    keys = {"training__total_train_steps": 20}
    whole = pool.run(with_scale, 2, config_of(tmp_path / "whole", "dp2", **keys))[0]
    config = config_of(tmp_path, "dp2", training__max_tokens=9 * BATCH * 16, checkpoint__async_save=True, **keys)
    first = pool.run(with_scale, 2, config)[0]
    state = read_state(tmp_path / "step_00000009")
    assert state is not None
    skipped = first["grad_norms"].count(0)
    assert state.loss_scale == {
        "value": START / 2**skipped,
        "interval": INTERVAL,
        "steps": 9 - skipped,
        "skipped": skipped,
    }
    second = pool.run(with_scale, 2, config_of(tmp_path, "dp2", checkpoint__load_path="latest", **keys))[0]
    assert first["losses"] + second["losses"] == whole["losses"]
    (tmp_path / "other").mkdir()
    start = {"checkpoint__load_path": str(tmp_path / "step_00000009"), "model__dtype": "float32"}
    config = config_of(tmp_path / "other", "dp2", **start, training__max_tokens=10 * BATCH * 16, **keys)
    pool.run(with_scale, 2, config)
    other = read_state(tmp_path / "other" / "step_00000010")
    assert other is not None
    assert other.loss_scale == state.loss_scale  # for another resume


@pytest.mark.usefixtures("_one_rank")
def test_a_step_without_the_loss_scale_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = wrapped(config, tiny_llama())
    optimizer = make_optimizer(model, config)
    with pytest.raises(UserError, match=r"call update_weights of workbench\.variants\.choose"):
        optimizer.step()


def test_a_run_whose_gradients_always_overflow_ends_with_a_sentence() -> None:
    scale = LossScale(2.0)
    scale.update(False)
    with pytest.raises(UserError, match="overflow float16 with a loss scale of 1; use a lower"):
        scale.update(False)
