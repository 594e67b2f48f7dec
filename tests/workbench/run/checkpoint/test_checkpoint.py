"""Checkpoints: a run resumes bit for bit, or with other data or batches; transformers loads checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import BATCH, Run, assert_same_tensors, first_half, model_of, run_config, tensors_of
from tests.support.samples import write_jsonl
from workbench.run.checkpoint.checkpoint import read_state
from workbench.run.run_folder import checkpoint_folders


def test_bfloat16_checkpoint_preserves_master_weights(run: Run, tmp_path: Path) -> None:
    """The same layout resumes bit for bit; a different layout starts from bitwise equal master weights."""
    model, layout = model_of(True), "pp2 tp2 bfloat16"
    whole = run(run_config(tmp_path / "whole", layout), model)
    run(first_half(tmp_path / "run", layout), model)
    half = tmp_path / "run" / "step_00000005"
    masters, weights = tensors_of(half, "master"), tensors_of(half, "model")
    assert all(masters[name].to(torch.bfloat16).equal(weight) for name, weight in weights.items())
    assert not any(master.equal(master.bfloat16().float()) for name, master in masters.items() if "proj" in name)

    loaded = AutoModelForCausalLM.from_pretrained(half)
    assert (loaded.dtype, loaded.config.vocab_size) == (torch.bfloat16, 61)
    assert all(loaded.get_parameter(name).equal(weight) for name, weight in weights.items())
    for kind, tensors in (("model", weights), ("master", masters)):
        assert len([*half.glob(f"{kind}*.safetensors")]) == 2  # one for each stage
        metadata = json.loads((half / f"{kind}.safetensors.index.json").read_text())["metadata"]
        assert metadata == {"total_size": sum(each.nbytes for each in tensors.values())}

    result = run(run_config(tmp_path / "run", layout, checkpoint__load_path="latest"), model)
    assert result["losses"] == whole["losses"][5:]
    assert_same_tensors(*(tmp_path / name / "step_00000010" for name in ("run", "whole")))

    # A negligible learning rate in a different layout: the weights are written as they were read.
    still = {"training__learning_rate": 1e-30, "training__weight_decay": 0.0, "checkpoint__load_path": str(half)}
    run(run_config(tmp_path / "other", "pp3 bfloat16", **still, training__total_train_steps=6), model)
    again = tensors_of(tmp_path / "other" / "step_00000006", "master")
    assert all(again[name].equal(master) for name, master in masters.items())


def test_keep_best_keeps_the_checkpoint_of_the_lowest_evaluation(run: Run, tmp_path: Path) -> None:
    losses = {2: 3.0, 3: 0.5, 4: 1.0, 6: 2.0, 8: 4.0, 10: 5.0}  # step 3 has no checkpoint
    records = [{"step": step, "loss": 1.0, "eval_loss": loss} for step, loss in losses.items()]
    write_jsonl(tmp_path / "metrics.jsonl", records)
    keys = {"checkpoint__save_frequency": 2, "checkpoint__keep_last": 1, "checkpoint__keep_best": True}
    run(run_config(tmp_path, training__eval_frequency=1, **keys))
    assert list(checkpoint_folders(tmp_path)) == [4, 10]


@pytest.mark.parametrize(
    ("changes", "samples", "tokens"),
    [
        ({"training__seq_length": 8}, 5 * BATCH, 5 * BATCH * (16 + 8)),  # other data, from the first sample
        ({"layout": "m1"}, 5 * (BATCH + 4), 5 * (BATCH + 4) * 16),  # half a batch
    ],
)
def test_a_run_resumes_with_other_data_or_batches(
    run: Run, tmp_path: Path, changes: dict[str, Any], samples: int, tokens: int
) -> None:
    run(first_half(tmp_path))
    assert len(run(run_config(tmp_path, checkpoint__load_path="latest", **changes))["losses"]) == 5
    state = json.loads((tmp_path / "step_00000010/trainer_state.json").read_text())
    assert (state["step"], state["samples"], state["tokens"]) == (10, samples, tokens)


def test_a_checkpoint_without_its_state_has_weights(tmp_path: Path) -> None:
    (tmp_path / "exp_avg.safetensors").touch()
    assert read_state(tmp_path, weights_only=True) is None
