"""Model folders of other programs, which may be damaged, or whose tensors may contradict their config; and folders to
hand on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from conformance.worker_pool import WorkerPool
from picotron.config import Model
from picotron.console import UserError
from picotron.model.llama import Llama
from picotron.model.weights import materialise
from tests.support.checkpoints import Run, run_config
from tests.support.messages import error_of, logged_warnings
from tests.support.oracle import assert_close, make_config, tiny_llama
from tests.support.training import CPU
from workbench.export import export
from workbench.run.checkpoint.checkpoint import STATE_FILE, Checkpoint
from workbench.run.checkpoint.safetensors_folder import SafetensorsFolder, find_folder
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
    with torch.device("meta"):
        model = Llama(load_model_config(Model(name=str(folder))))
    with logged_warnings() as lines:
        error = error_of(lambda: materialise(model, CPU, Checkpoint(folder, weights_only=True).weights()))
    return error if error != "no error" else model(IDS).detach(), lines


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


def test_exported_model_is_the_checkpoints_and_its_card_names_no_folder(run: Run, tmp_path: Path) -> None:
    folder, keys = tmp_path / "my run", {"model__dtype": "bfloat16", "checkpoint__save_frequency": 5}
    mixture = {str(tmp_path / "*.jsonl"): 2.0, "somebody/texts": 1.0}
    run(run_config(folder, {"dp_size": 2}, dataset__mixture=mixture, **keys))
    records = [{"step": 5, "loss": 3.0}, {"step": 10, "loss": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    checkpoint, exported = folder / "step_00000005", tmp_path / "model"
    (checkpoint / "model.safetensors").rename(tmp_path / "blob")
    (checkpoint / "model.safetensors").symlink_to("../../blob")  # as in the hub's cache
    export(checkpoint, exported)
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    assert [path.name for path in exported.glob("*.safetensors")] == ["model.safetensors"]
    assert not (exported / STATE_FILE).exists()
    ours, theirs = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (exported, checkpoint))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    AutoTokenizer.from_pretrained(exported)

    text = (exported / "README.md").read_text()
    card, facts = ModelCard(text), json.loads(text.partition("```json")[2].partition("```")[0])
    assert (card.data.library_name, card.data.datasets) == ("transformers", ["somebody/texts"])
    assert str(tmp_path) not in text
    assert (facts["loss"], facts["layout"]) == (3.0, "dp 2 x pp 1 x cp 1 x tp 1")
    assert facts["config"]["dataset"]["mixture"] == {"*.jsonl": 2.0, "somebody/texts": 1.0}
    with pytest.raises(UserError, match="exists; choose another folder"):
        export(checkpoint, exported)


@pytest.mark.parametrize(("rate", "warns"), [(5e-3, True), (2e-5, False)])
def test_a_high_learning_rate_for_trained_weights_is_named(
    caplog: pytest.LogCaptureFixture, rate: float, warns: bool
) -> None:
    weights = object.__new__(Checkpoint)
    weights.state = None  # as of a model's folder
    weights.progress("", make_config(training__learning_rate=rate).training)
    assert ("is high for weights that are trained already" in caplog.text) == warns


def load(folder: Path, **changes: int) -> Llama:
    with torch.device("meta"):
        model = Llama(tiny_llama(**changes))
    materialise(model, CPU, SafetensorsFolder(find_folder(str(folder))).read)
    return model


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_weights_are_not_read_as_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = LlamaForCausalLM(tiny_llama())
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} of .* is in .*; a quantised model has to be dequantised first"):
        load(tmp_path)
    save_file(tensors | {name: tensors[name].half()}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).state_dict()[name], tensors[name].half().float())


def test_a_folder_with_two_sets_of_weights_is_read_as_transformers_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for size in ("1GB", "10KB"):
        torch.manual_seed(len(size))
        LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path / size, max_shard_size=size)
    for path in (tmp_path / "10KB").glob("model*"):
        path.rename(tmp_path / "1GB" / path.name)
    (tmp_path / "1GB" / "adapter_config.json").write_text("{}")
    theirs, ours = LlamaForCausalLM.from_pretrained(tmp_path / "1GB"), load(tmp_path / "1GB")
    assert torch.equal(theirs.lm_head.weight, ours.lm_head.weight)
    assert "the adapter in" in caplog.text


@pytest.mark.parametrize(
    ("breaks", "changes", "message"),
    [
        (
            lambda file: file.rename(file.with_name("pytorch_model.bin")),
            {},
            "has no readable model.safetensors .*; only",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), {}, "are damaged .*; download or save them again"),
        (
            lambda file: (
                file.rename(file.with_name("other"))
                .with_name(file.name + ".index.json")
                .write_text(
                    json.dumps({"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}})
                )
            ),
            {},
            "model-00001-of-00002.safetensors is missing or cannot be read",
        ),
        (Path.exists, {"vocab_size": 64}, r"has shape \[61, 32\], but the model expects \[64, 32\]"),
        (
            Path.exists,
            {"num_hidden_layers": 4},
            r"no tensor model\.layers\.3.input_layernorm.weight; of its 30 tensors",
        ),
    ],
)
def test_folders_that_are_damaged_or_do_not_fit_are_rejected(
    tmp_path: Path, breaks: Callable[[Path], Any], changes: dict[str, int], message: str
) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path)
    breaks(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(tmp_path, **changes)


def test_a_name_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(UserError, match="is not a local folder and cannot be downloaded"):
        find_folder("nobody/no-such-model")
