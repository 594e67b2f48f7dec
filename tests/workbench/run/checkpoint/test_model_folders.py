"""Model folders of other programs, whose tensors may contradict their config; and folders to hand on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.worker_pool import WorkerPool
from picotron.config import Model
from picotron.console import UserError
from picotron.model.llama import Llama
from picotron.model.weights import materialise
from tests.support.checkpoints import first_half, model_of, recorded_warnings, run, run_config
from tests.support.oracle import assert_close, make_config, tiny_llama
from tests.support.training import CPU
from workbench.export import export
from workbench.run.checkpoint.checkpoint import STATE_FILE, Checkpoint, check_files, read_state
from workbench.run.model_config import load_model_config

Tensors = dict[str, Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = torch.arange(2 * 13).view(2, 13)


def with_own_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1  # in a row of the last rank


def with_equal_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def with_head_only(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def without_head(tensors: Tensors) -> None:
    del tensors[HEAD]


def with_others(tensors: Tensors) -> None:
    tensors |= {"value_head.weight": torch.ones(1, 32), "model.layers.3.input_layernorm.weight": torch.ones(32)}
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}


def with_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"base_model.model.{name}"] = tensors.pop(name)


def folder_of(path: Path, tied: bool, edit: Callable[[Tensors], None]) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_llama(tie_word_embeddings=tied), dtype=torch.float32).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def logits_of(folder: Path) -> tuple[Tensor | str, list[str]]:
    """Return our logits, or the sentence of a UserError, and the warnings."""
    with recorded_warnings() as lines:
        try:
            with torch.device("meta"):
                model = Llama(load_model_config(Model(name=str(folder))))
            materialise(model, CPU, Checkpoint(folder, weights_only=True).weights())
            return model(IDS).detach(), lines
        except UserError as error:
            return str(error), lines


@pytest.mark.parametrize(
    ("tied", "edit", "warning"),
    [
        (True, with_equal_head, None),
        (True, with_head_only, None),
        (
            False,
            with_others,
            "2 tensors that the model ignores: model.layers.3.input_layernorm.weight, value_head.weight",
        ),
    ],
)
def test_weights_are_those_of_transformers(
    pool: WorkerPool, tmp_path: Path, tied: bool, edit: Any, warning: str | None
) -> None:
    folder = folder_of(tmp_path, tied, edit)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits.detach()
    for rank, (logits, lines) in enumerate(pool.run(logits_of, 2, folder)):
        assert_close(logits, expected, 1e-5)
        assert [line.partition(" has ")[2] for line in lines] == ([warning] if warning and rank == 0 else [])


@pytest.mark.parametrize(
    ("tied", "edit", "sentence"),
    [
        (
            True,
            with_own_head,
            "has its own lm_head.weight, which differs from model.embed_tokens.weight, but tie_word_embeddings is true",
        ),
        (False, without_head, "has no tensor lm_head.weight; of its 29 tensors"),
        (False, with_prefix, "base_model.model.model.embed_tokens.weight has the closest name"),
    ],
)
def test_contradictions_are_refused_with_the_names_of_tensors(
    pool: WorkerPool, tmp_path: Path, tied: bool, edit: Any, sentence: str
) -> None:
    (first, _), (second, _) = pool.run(logits_of, 2, folder_of(tmp_path, tied, edit))
    assert first == second
    assert sentence in first


def test_exported_model_is_the_checkpoints_and_its_card_names_no_folder(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path
) -> None:
    config = run_config(
        tmp_path / "my run", {"dp_size": 2}, checkpoint__load_path="latest or " + str(tmp_path / "start"),
        dataset__mixture={str(tmp_path / "*.jsonl"): 2.0, "somebody/texts": 1.0}, model__dtype="bfloat16",
    )  # fmt: skip
    run(pool, first_half(tmp_path / "first", {}, model__dtype="bfloat16"), model_of(False), tokenizer)
    (tmp_path / "my run").mkdir()
    records = [{"step": 5, "loss": 3.0}, {"step": 10, "loss": 2.0}]
    (tmp_path / "my run" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "first" / "step_00000005").rename(tmp_path / "start")
    run(pool, config, model_of(False), tokenizer)
    checkpoint, folder = tmp_path / "my run" / "step_00000010", tmp_path / "model"
    (checkpoint / "model.safetensors").rename(tmp_path / "blob")
    (checkpoint / "model.safetensors").symlink_to("../../blob")  # as in the hub's cache
    export(checkpoint, folder)
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not (folder / STATE_FILE).exists()
    ours, theirs = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (folder, checkpoint))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    AutoTokenizer.from_pretrained(folder)

    text = (folder / "README.md").read_text()
    card = ModelCard(text)
    assert (card.data.library_name, card.data.datasets) == ("transformers", ["somebody/texts"])
    assert str(tmp_path) not in text
    assert "dp 2 x pp 1 x cp 1 x tp 1" in text
    assert "| loss | 2.0000 in the last step |" in text
    keys = json.loads(text.partition("```json")[2].partition("```")[0])
    assert not keys.keys() & {"checkpoint", "logging", "environment"}
    assert keys["dataset"]["mixture"] == {"*.jsonl": 2.0, "somebody/texts": 1.0}

    (folder / "README.md").write_text("edited")
    (checkpoint / "README.md").unlink()
    state = read_state(checkpoint)
    assert state is not None
    check_files(checkpoint, state.files)
    with pytest.raises(UserError, match="exists; choose another folder"):
        export(checkpoint, folder)


@pytest.mark.parametrize(("rate", "warns"), [(5e-3, True), (2e-5, False)])
def test_a_high_learning_rate_for_trained_weights_is_named(
    caplog: pytest.LogCaptureFixture, rate: float, warns: bool
) -> None:
    weights = object.__new__(Checkpoint)
    weights.state = None  # as of a model's folder
    weights.progress("", make_config(training__learning_rate=rate).training)
    assert ("is high for weights that are trained already" in caplog.text) == warns
