"""The memory tab of the playground, compared with the trainer."""

import itertools
from typing import Any

import pytest
from transformers import LlamaConfig

from picotron.console import UserError
from playground.memory import MODEL, MemoryRequest
from tests.playground.test_playground import ask
from workbench.pipelines.engine import check_layout
from workbench.pipelines.memory import rank_memory
from workbench.run.config_reader import parse_config
from workbench.run.model_config import check_supported

SECTIONS = {
    "distributed": ("tp_", "cp_", "pp_", "dp_", "sequence_parallel"),
    "training": ("seq_", "micro_", "gradient_", "activation_", "optimizer_"),
    "model": ("dtype",),
}


def trained(**changes: Any) -> tuple[Any, LlamaConfig]:
    """Return the config and the model of a request as the trainer reads them.

    Raises:
        UserError: the config is refused.
    """
    request = vars(MemoryRequest(**changes))
    sections: dict[str, Any] = {
        name: {key: value for key, value in request.items() if key.startswith(prefixes)}
        for name, prefixes in SECTIONS.items()
    }
    layout = sections["distributed"]
    layout["pp_chunks"] = layout["pp_chunks"] if layout["pp_size"] > 1 and layout["pp_chunks"] else None
    sections["model"]["name"] = "docs/llama-3.1-8b"
    config = parse_config({**sections, "dataset": {"name": "python-stdlib"}})
    sizes = {key: request[key] for key in MODEL}
    return config, LlamaConfig(**{**sizes, "head_dim": sizes["head_dim"] or None}, pad_token_id=None)


SIXTEEN = {"tp_size": 4, "pp_size": 2, "dp_size": 2, "num_hidden_layers": 24}


@pytest.mark.parametrize(
    "changes",
    [
        {**SIXTEEN, "dp_engine": "zero3", "activation_checkpointing": "full", "optimizer_states": "bfloat16"},
        {**SIXTEEN, "pp_engine": "interleaved_1f1b", "pp_chunks": 3, "cp_size": 4, "head_dim": 64, "vocab_size": 50257},
        {"pp_chunks": 1},
    ],
)
def test_memory_is_that_of_the_trainer(changes: dict[str, Any]) -> None:
    config, model = trained(**changes)
    expected = rank_memory(config, model, check_layout(config, model))
    for rank, memory in zip(ask("memory", **changes)["ranks"], expected, strict=True):
        assert {name: rank[name] for name in vars(memory)} == vars(memory)
        assert rank["total"] == memory.total


def test_mistakes_are_those_that_the_trainer_finds() -> None:
    """Over a grid of sizes, the tab refuses a layout if and only if the trainer does, and names a control for it."""
    grid: dict[str, tuple[Any, ...]] = {
        "num_attention_heads": (8, 12),
        "num_key_value_heads": (2, 4),
        "intermediate_size": (96, 160),
    }
    grid |= {"tp_size": (1, 3, 8), "cp_size": (1, 2, 3), "cp_engine": ("ring", "ulysses"), "seq_length": (48, 60)}
    fixed = {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 100, "pp_size": 1, "dp_size": 1}
    found: set[str] = set()
    for values in itertools.product(*grid.values()):
        request = {**fixed, **dict(zip(grid, values, strict=True))}
        result = ask("memory", **request)
        assert ("error" in result) == is_refused(**request), (request, result)
        if "error" in result:
            found.add(result["field"])
    assert found == {"tp_size", "seq_length", "cp_size", "cp_engine"}
    others: dict[str, dict[str, Any]] = {
        "optimizer_states": {"optimizer_states": "bfloat16", "dtype": "float32"},
        "cp_engine": {"cp_size": 2, "dtype": "float64"},
        "head_dim": {"head_dim": 3},
        "pp_engine": {"pp_size": 64},
    }
    for field, request in others.items():
        assert is_refused(**request)
        assert ask("memory", **request).get("field") == field


def is_refused(**request: Any) -> bool:
    """Return whether the trainer refuses a request."""
    try:
        config, model = trained(**request)
        check_supported(model)
        check_layout(config, model)
    except UserError:
        return True
    return False
