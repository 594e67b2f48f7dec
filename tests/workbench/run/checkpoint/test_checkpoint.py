"""Checkpoints: a run resumes bit for bit, or with other data or batches; transformers loads checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from picotron.model.llama import Llama
from picotron.model.weights import materialise
from tests.support.checkpoints import BATCH, LAYOUTS, first_half, model_of, run, run_config, tensors_of
from tests.support.oracle import assert_close, random_tokens, with_exact_norms
from workbench.run.checkpoint import safetensors_folder
from workbench.run.checkpoint.checkpoint import read_state
from workbench.run.run_folder import checkpoint_folders

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_a_checkpoint_and_computes_equal_logits(
    checkpoint_at_step_5: Any, tokenizer: Path, tied: bool
) -> None:
    folder, config = checkpoint_at_step_5(1, tied), model_of(tied)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float64
    assert theirs.config.to_dict()["vocab_size"] == 61
    with torch.device("meta"):
        ours = Llama(config).to(torch.float64)
    materialise(ours, CPU, safetensors_folder.SafetensorsFolder(folder).read)
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    assert_close(ours(ids), with_exact_norms(theirs)(input_ids=ids, use_cache=False).logits, 1e-12, "logits")
    # All layouts write the same tensors.
    reference = checkpoint_at_step_5(0, tied)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        tensors, expected = tensors_of(folder, kind), tensors_of(reference, kind)
        assert tensors.keys() == expected.keys() == dict(ours.named_parameters()).keys()
        for name, tensor in tensors.items():
            assert_close(tensor, expected[name], what=f"{kind} of {name}")
    text = "def f(x)"
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded(text)["input_ids"] == AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == loaded.eos_token_id == 0
    files = {path.name for path in folder.iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) == 3 * 2  # one for each stage


def test_bfloat16_checkpoint_preserves_master_weights(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    """The same layout resumes bit for bit; a different layout starts from bitwise equal master weights."""
    model, layout, dtype = model_of(True), LAYOUTS[1], {"model__dtype": "bfloat16"}
    whole = run(pool, run_config(tmp_path / "whole", layout, **dtype), model, tokenizer)
    run(pool, first_half(tmp_path / "run", layout, **dtype), model, tokenizer)
    half = tmp_path / "run" / "step_00000005"
    masters, weights = tensors_of(half, "master"), tensors_of(half, "model")
    assert all(masters[name].to(torch.bfloat16).equal(weight) for name, weight in weights.items())
    assert not any(master.equal(master.bfloat16().float()) for name, master in masters.items() if "proj" in name)
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16

    result = run(pool, run_config(tmp_path / "run", layout, checkpoint__load_path="latest", **dtype), model, tokenizer)
    assert result["losses"] == whole["losses"][5:]
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        ours, theirs = (tensors_of(tmp_path / name / "step_00000010", kind) for name in ("run", "whole"))
        assert all(ours[name].equal(theirs[name]) for name in theirs)

    # A negligible learning rate in a different layout: the weights are written as they were read.
    still = {"training__learning_rate": 1e-30, "training__weight_decay": 0.0, "checkpoint__load_path": str(half)}
    other = first_half(tmp_path / "other", {"pp_size": 3}, **still | dtype | {"training__total_train_steps": 6})
    other = other.model_copy(update={"training": other.training.model_copy(update={"max_tokens": None})})
    run(pool, other, model, tokenizer)
    again = tensors_of(tmp_path / "other" / "step_00000006", "master")
    assert all(again[name].equal(master) for name, master in masters.items())


def test_model_folder_without_trainer_state_starts_at_step_0(
    pool: WorkerPool, checkpoint_at_step_5: Any, tokenizer: Path, tmp_path: Path
) -> None:
    """The first loss is that of the weights in the folder."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_at_step_5(0, False))
    model.save_pretrained(tmp_path / "model")
    config = run_config(tmp_path / "run", {"pp_size": 2}, checkpoint__load_path=str(tmp_path / "model"))
    result = run(pool, config, model_of(False), tokenizer)
    assert len(result["losses"]) == 10
    rows = torch.from_numpy(random_tokens()[: BATCH * 16 + 1].astype("int64"))
    logits = with_exact_norms(model)(input_ids=rows[:-1].view(BATCH, 16), use_cache=False).logits
    assert_close(result["losses"][0], torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[1:]).item())


def test_latest_resumes_and_keep_last_deletes_older_checkpoints(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path
) -> None:
    layout, model = {"dp_size": 2}, model_of(False)
    keys = {"checkpoint__save_frequency": 2, "checkpoint__keep_last": 2, "checkpoint__load_path": "latest"}
    (tmp_path / "step_00000004.unfinished").mkdir()  # left behind by a killed run
    first = run(pool, first_half(tmp_path, layout, **keys), model, tokenizer)
    assert len(first["losses"]) == 5  # there was no checkpoint to resume from
    assert list(checkpoint_folders(tmp_path)) == [4, 5]
    second = run(pool, run_config(tmp_path, layout, **keys), model, tokenizer)
    assert list(checkpoint_folders(tmp_path)) == [8, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000008", "step_00000010"]
    whole = run(pool, run_config(tmp_path / "whole", layout), model, tokenizer)
    assert first["losses"] + second["losses"] == whole["losses"]
    third = run(pool, run_config(tmp_path, layout, **keys), model, tokenizer)
    assert third["losses"] == []  # training was complete


def test_keep_best_keeps_the_checkpoint_of_the_lowest_evaluation(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path
) -> None:
    losses = {2: 3.0, 3: 0.5, 4: 1.0, 6: 2.0, 8: 4.0, 10: 5.0}  # step 3 has no checkpoint
    lines = [json.dumps({"step": step, "loss": 1.0, "eval_loss": loss}) + "\n" for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    keys = {"checkpoint__save_frequency": 2, "checkpoint__keep_last": 1, "checkpoint__keep_best": True}
    run(pool, run_config(tmp_path, {}, training__eval_frequency=1, **keys), model_of(False), tokenizer)
    assert list(checkpoint_folders(tmp_path)) == [4, 10]


def test_changed_data_restarts_at_sample_0_and_keeps_the_step(
    pool: WorkerPool, checkpoint_at_step_5: Any, tokenizer: Path, tmp_path: Path
) -> None:
    keys = {"checkpoint__load_path": str(checkpoint_at_step_5(0, False)), "training__seq_length": 8}
    config = run_config(tmp_path, {}, **keys)
    assert len(run(pool, config, model_of(False), tokenizer)["losses"]) == 5
    state = json.loads((tmp_path / "step_00000010/trainer_state.json").read_text())
    assert (state["step"], state["samples"]) == (10, 5 * BATCH)
    assert state["tokens"] == 5 * BATCH * (16 + config.training.seq_length)


def test_changed_global_batch_size_resumes_at_the_same_sample(
    pool: WorkerPool, checkpoint_at_step_5: Any, tokenizer: Path, tmp_path: Path
) -> None:
    config = run_config(
        tmp_path, {}, checkpoint__load_path=str(checkpoint_at_step_5(0, False)), training__gradient_accumulation_steps=1
    )
    run(pool, config, model_of(False), tokenizer)
    state = json.loads((tmp_path / "step_00000010/trainer_state.json").read_text())
    assert (state["step"], state["samples"], state["tokens"]) == (10, 5 * BATCH + 5 * 4, 5 * 16 * (BATCH + 4))


def test_a_checkpoint_without_its_state_has_weights(tmp_path: Path) -> None:
    (tmp_path / "exp_avg.safetensors").touch()
    assert read_state(tmp_path, weights_only=True) is None
    with pytest.raises(UserError, match=r"trainer_state\.json is missing"):
        read_state(tmp_path)
