"""The model: initial weights, and what configs of models say."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conformance import models
from picotron.config import Model
from picotron.console import UserError
from picotron.model import weights
from picotron.model.families import FAMILIES, differences
from picotron.model.llama import rope, rope_frequencies
from picotron.model.weights import initial_weights
from tests.support.oracle import assert_close, make_config, oracle_model, our_model, tiny_llama, with_exact_norms
from workbench.pipelines.engine import check_layout
from workbench.run.model_config import load_model_config


def test_conformance_knows_the_families_of_the_model() -> None:
    assert models.FAMILIES.keys() == FAMILIES.keys()


def test_shards_are_slices_of_the_same_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank draws only the tiles that its shard overlaps."""
    monkeypatch.setattr(weights, "TILE", 8)
    name, shape = "model.embed_tokens.weight", torch.Size([37, 21])
    draw = initial_weights(tiny_llama(pad_token_id=20), seed=3)
    full = draw(name, shape, ())
    assert full[20].count_nonzero() == 0
    last = initial_weights(tiny_llama(pad_token_id=-1, vocab_size=37), seed=3)(name, shape, ())
    assert [row.count_nonzero().item() for row in last[-2:]] == [21, 0]
    assert len({full[i, j].item() for i in range(0, 37, 8) for j in range(0, 21, 8)}) == 5 * 3
    edges = (0, 3, 8, 19, 20, 21, 24, 37), (0, 5, 8, 21)
    for rows, columns in itertools.product(
        *(itertools.starmap(slice, itertools.combinations(each, 2)) for each in edges)
    ):
        assert torch.equal(draw(name, shape, (rows, columns)), full[rows, columns])
    drawn: list[int] = []
    normal = torch.normal
    monkeypatch.setattr(
        torch, "normal", lambda *args, **kwargs: (drawn.append(args[2].numel()), normal(*args, **kwargs))[1]
    )
    draw(name, shape, (slice(8, 16),))
    assert sum(drawn) == 8 * 21


def test_initial_weights_have_the_distribution_of_transformers() -> None:
    config = tiny_llama(hidden_size=128, intermediate_size=256, vocab_size=500, initializer_range=0.02, pad_token_id=7)
    draw = initial_weights(config, seed=3)
    weight = draw("model.embed_tokens.weight", torch.Size([500, 128]), ())
    assert weight.mean().abs() < 4 * 0.02 / weight.numel() ** 0.5
    assert (weight.std() / 0.02 - 1).abs() < 0.02
    assert weight[7].count_nonzero() == 0
    assert torch.equal(draw("model.norm.weight", torch.Size([9]), ()), torch.ones(9))
    assert torch.equal(draw("model.layers.0.mlp.up_proj.bias", torch.Size([9]), ()), torch.zeros(9))


def test_heads_can_be_changed_and_their_size_follows(tmp_path: Path) -> None:
    """Without head_dim in config.json, the head size is hidden_size / num_attention_heads, also with an override."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}'
    )
    config = load_model_config(Model(name=str(tmp_path), num_attention_heads=8, num_key_value_heads=2))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 4)


SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPELLINGS: dict[str, dict[str, Any]] = {
    "linear in type": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3, original length at the top": {
        "rope_theta": 100.0,
        "rope_scaling": {"rope_type": "llama3", **SCALED},
        "original_max_position_embeddings": 16,
    },
    "two values of theta": {"rope_theta": 100.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_of_a_config_file_equals_transformers(spelling: str, tmp_path: Path) -> None:
    """Both read the file themselves."""
    keys = tiny_llama().to_dict()
    del keys["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(keys | SPELLINGS[spelling]))
    theirs = with_exact_norms(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).double())
    ours = our_model(load_model_config(Model(name=str(tmp_path))))
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(1))
    assert_close(ours(ids), theirs(input_ids=ids, use_cache=False).logits, what="logits")


def test_rotary_angles_of_distant_positions_equal_transformers() -> None:
    config = tiny_llama()
    position_ids = torch.arange(2**17)[None]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), position_ids)
    for ours, theirs in zip(rope(rope_frequencies(config), position_ids), expected, strict=True):
        assert torch.equal(ours[:, :, 0], theirs[..., : config.head_dim // 2])


def test_recomputation_draws_the_random_numbers_of_forward() -> None:
    """Dropout in a hook of a user drops the same numbers again."""
    ids, gradients = torch.arange(12).view(2, 6), []
    for recomputes in (False, True):
        model = our_model(tiny_llama(), checkpoint_activations=recomputes)
        for layer in model.model.layers.values():
            layer.mlp.register_forward_hook(lambda _, x, y: F.dropout(y))
        torch.manual_seed(0)
        model(ids, target_ids=ids).backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    assert torch.equal(*gradients)


def test_window_is_accepted_where_it_cannot_act(tmp_path: Path) -> None:
    """transformers' logits are those without a window up to its length, and differ beyond it."""
    config = tiny_llama("mistral", sliding_window=12)
    model = our_model(config)
    ids = torch.randint(61, (3, 23), generator=torch.Generator().manual_seed(1))
    for length, same in ((12, True), (13, False)):
        expected = oracle_model(config, model.state_dict())(input_ids=ids[:, :length], use_cache=False).logits
        assert torch.allclose(model(ids[:, :length]), expected, rtol=1e-9) == same
    check_layout(make_config(training__seq_length=12), config)
    with pytest.raises(UserError, match=r"seq_length=13 .* sliding_window=12"):
        check_layout(make_config(training__seq_length=13), config)
    check_layout(make_config(training__seq_length=13), tiny_llama("mistral", sliding_window=0))  # none


@pytest.mark.parametrize(("key", "layers"), [("layer_types", 5), ("no_rope_layers", 2)])
def test_number_of_layers_can_be_changed_beside_a_list_of_layers(tmp_path: Path, key: str, layers: int) -> None:
    tiny_llama("smollm3", num_hidden_layers=3).save_pretrained(tmp_path)
    assert len(json.loads((tmp_path / "config.json").read_text())[key]) == 3
    config = load_model_config(Model(name=str(tmp_path), num_hidden_layers=layers))
    assert len(getattr(config, key)) == config.num_hidden_layers == layers
    assert differences(config).unrotated == tuple(range(1, layers, 2))
