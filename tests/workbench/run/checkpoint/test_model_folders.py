"""Model folders of other programs, which may be damaged, or whose tensors may contradict their config; and folders to
hand on.
"""

import json
import re
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
from tests.support.checkpoints import Run, run_config, train
from tests.support.messages import error_of, logged_warnings
from tests.support.oracle import assert_close, tiny_llama
from tests.support.samples import write_jsonl
from tests.support.training import CPU
from workbench.export import export
from workbench.run.checkpoint.checkpoint import STATE_FILE, Checkpoint
from workbench.run.checkpoint.safetensors_folder import find_folder
from workbench.run.model_config import load_model_config

Tensors = dict[str, Tensor]
EMBEDDING, HEAD, MATRIX = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
IDS = torch.arange(2 * 13).view(2, 13)


def edited(change: Callable[[Tensors], Tensors]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = change(load_file(file := folder / "model.safetensors"))
        save_file({name: each.contiguous() for name, each in tensors.items()}, file, {"format": "pt"})

    return edit


def enlarge_vocabulary(folder: Path) -> None:
    (file := folder / "config.json").write_text(file.read_text().replace('"vocab_size": 61', '"vocab_size": 64'))


def add_other_weights(folder: Path) -> None:
    """Add shards of other weights, and an adapter."""
    LlamaForCausalLM(tiny_llama()).save_pretrained(folder / "other", max_shard_size="10KB")
    for path in (folder / "other").glob("model*"):
        path.rename(folder / path.name)
    (folder / "adapter_config.json").write_text("{}")


def logits_of(folder: Path) -> tuple[Tensor | str, list[str]]:
    """Return our logits, or the sentence of a UserError, and the warnings."""
    with torch.device("meta"):
        model = Llama(load_model_config(Model(name=str(folder))))
    with logged_warnings() as lines:
        error = error_of(lambda: materialise(model, CPU, Checkpoint(folder, weights_only=True).weights()))
    return error if error != "no error" else model(IDS).detach(), lines


OTHERS = {"value_head.weight": torch.ones(1, 32), "model.layers.3.input_layernorm.weight": torch.ones(32)}
OTHERS |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
IN_LAST_ROW = torch.arange(61)[:, None] == 60  # which the last rank compares
FOLDERS = [  # whether the ends are tied, a change, and the warning of rank 0, or the sentence of all ranks
    (True, edited(lambda tensors: tensors | {HEAD: tensors[EMBEDDING].clone()}), ""),
    (True, edited(lambda tensors: {HEAD if name == EMBEDDING else name: each for name, each in tensors.items()}), ""),
    (False, edited(lambda tensors: tensors | {MATRIX: tensors[MATRIX].half()}), ""),
    (False, edited(lambda tensors: tensors | OTHERS), "has 2 tensors that the model ignores: model.layers.3.input_layernorm.weight, value_head.weight"),
    (False, add_other_weights, "the adapter in"),
    (True, edited(lambda tensors: tensors | {HEAD: tensors[EMBEDDING] + IN_LAST_ROW}),
     "has its own lm_head.weight, which differs from model.embed_tokens.weight, but tie_word_embeddings is true"),
    (False, edited(lambda tensors: {name: tensors[name] for name in tensors if name != HEAD}),
     "has no tensor lm_head.weight; of its 29 tensors"),
    (False, edited(lambda tensors: {f"base_model.model.{name}": each for name, each in tensors.items()}),
     "base_model.model.model.embed_tokens.weight has the closest name"),
    *((False, edited(lambda tensors, dtype=dtype: tensors | {MATRIX: tensors[MATRIX].to(dtype)}),
       f"{MATRIX} of .* is in .*; a quantised model has to be dequantised first")
      for dtype in (torch.float8_e4m3fn, torch.int8)),
    (False, lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "has no readable model.safetensors .*; only"),
    (False, enlarge_vocabulary, r"has shape \[61, 32\], but the model expects \[64, 32\]"),
]  # fmt: skip


@pytest.mark.parametrize(("tied", "change", "says"), FOLDERS)
def test_weights_are_those_of_transformers_or_refused(
    pool: WorkerPool, tmp_path: Path, tied: bool, change: Any, says: str
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_llama(tie_word_embeddings=tied), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    change(tmp_path)
    (first, lines), (second, others) = pool.run(logits_of, 2, tmp_path)
    assert re.search(says or "^$", first if isinstance(first, str) else "".join(lines))
    assert all("the adapter in" in line for line in others)
    if isinstance(first, str):
        assert first == second
    else:
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(IDS).logits.detach()
        assert_close(first, expected, 1e-5)
        assert_close(second, expected, 1e-5)


def test_exported_model_is_the_checkpoints_and_its_card_names_no_folder(run: Run, tmp_path: Path) -> None:
    folder, keys = tmp_path / "my run", {"checkpoint__save_frequency": 5}
    mixture = {str(tmp_path / "*.jsonl"): 2.0, "somebody/texts": 1.0}
    run(run_config(folder, "dp2 bfloat16", dataset__mixture=mixture, **keys))
    write_jsonl(
        folder / "metrics.jsonl",
        [{"step": 4, "loss": 4.0, "eval_loss": 4.0}, {"step": 5, "loss": 3.0}, {"step": 10, "loss": 2.0}],
    )
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
    assert "eval_loss" not in facts  # that of step 4 is of other weights
    assert facts["config"]["dataset"]["mixture"] == {"*.jsonl": 2.0, "somebody/texts": 1.0}
    with pytest.raises(UserError, match="exists; choose another folder"):
        export(checkpoint, exported)


def test_a_card_names_where_a_run_began_also_after_a_resume(pool: WorkerPool, tmp_path: Path) -> None:
    begun = f"{tmp_path}/base/step_00000001"
    for steps, (folder, start) in enumerate((("base", ""), ("tuned", begun), ("tuned", "latest")), 1):
        keys = {"checkpoint__load_path": start, "training__total_train_steps": steps, "training__warmup_steps": 0}
        pool.run(train, 1, run_config(tmp_path / folder, **keys), tiny_llama())
    export(tmp_path / "tuned" / "step_00000003", tmp_path / "model")
    assert '"training began with": "step_00000001"' in (tmp_path / "model" / "README.md").read_text()


def test_a_name_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(UserError, match="is not a local folder and cannot be downloaded"):
        find_folder("nobody/no-such-model")
