"""Safetensors folders: weights saved by transformers are loaded; damaged or unsuitable folders are rejected."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from picotron.console import UserError
from picotron.model.llama import Llama
from picotron.model.weights import materialise
from tests.support.oracle import tiny_llama
from workbench.run.checkpoint.safetensors_folder import SafetensorsFolder, find_folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: int) -> Llama:
    with torch.device("meta"):
        model = Llama(tiny_llama(**changes)).to(dtype)
    materialise(model, torch.device("cpu"), SafetensorsFolder(find_folder(str(folder))).read)
    return model


@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_saved_by_transformers_are_loaded_exactly(tmp_path: Path, tied: bool, shard_size: str) -> None:
    config = tiny_llama(tie_word_embeddings=tied)
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    ours = load(tmp_path, tie_word_embeddings=tied)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    half = load(tmp_path, torch.bfloat16, tie_word_embeddings=tied).lm_head.weight
    assert torch.equal(half, theirs.lm_head.weight.to(torch.bfloat16))


def test_read_returns_the_requested_slice_of_a_tensor(tmp_path: Path) -> None:
    theirs = LlamaForCausalLM(tiny_llama())
    theirs.save_pretrained(tmp_path)
    weight, folder = theirs.lm_head.weight, SafetensorsFolder(tmp_path)
    for index in ((slice(5, 9),), (slice(None), slice(3, 7)), ()):
        assert torch.equal(folder.read("lm_head.weight", weight.shape, index), weight[index])


def test_model_with_fewer_layers_than_the_folder_is_loaded(tmp_path: Path) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path)
    assert len(load(tmp_path, num_hidden_layers=1).model.layers) == 1


def break_folder(folder: Path, how: str) -> None:
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if how == "only pickle":
        file.unlink()
        torch.save({}, folder / "pytorch_model.bin")
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "missing shard":
        file.unlink()
        index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("only pickle", "has no readable model.safetensors or model.safetensors.index.json; only safetensors are read"),
        ("truncated", "are damaged .*; download or save them again"),
        ("missing shard", "model-00001-of-00002.safetensors is missing or cannot be read"),
    ],
)
def test_damaged_folder_is_rejected(tmp_path: Path, how: str, message: str) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path)
    break_folder(tmp_path, how)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


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


def test_folder_that_does_not_fit_the_model_is_rejected(tmp_path: Path) -> None:
    LlamaForCausalLM(tiny_llama()).save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=r"embed_tokens.weight of .*model.safetensors has shape \[61, 32\], but the model expects \[64, 32\]",
    ):
        load(tmp_path, vocab_size=64)
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.3.input_layernorm.weight; of its 30 tensors"):
        load(tmp_path, num_hidden_layers=4)
    with pytest.raises(UserError, match="is not a local folder and cannot be downloaded"):
        load(Path("nobody/no-such-model"))
