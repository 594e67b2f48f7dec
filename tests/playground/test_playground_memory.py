"""The memory tab and the scoreboard of the playground, compared with the trainer and with the scoreboard's command."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from picotron.command_line import parse_config
from picotron.console import UserError
from picotron.drawing import __main__ as drawing
from picotron.explain.estimate import rank_memory
from picotron.model.model_config import load_model_config
from picotron.parallelize import check_layout
from picotron.schedules.schedule_csv import as_csv
from picotron.schedules.schedules import build
from playground.bridge import call
from playground.memory import MODEL, MemoryRequest

SECTIONS = {
    "distributed": ("tp_", "cp_", "pp_", "dp_", "sequence_parallel"),
    "training": ("seq_", "micro_", "gradient_", "activation_"),
    "model": ("dtype",),
}


def ask(function: str, **request: Any) -> Any:
    return json.loads(call(function, json.dumps(request)))


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
    layout["pp_chunks"] = layout["pp_chunks"] or None
    if layout["pp_size"] == 1:
        layout["pp_chunks"] = None
    sections["model"]["name"] = "docs/llama-3.1-8b"
    config = parse_config({**sections, "dataset": {"name": "python-stdlib"}})
    sizes = {key: request[key] for key in MODEL}
    return config, LlamaConfig(**{**sizes, "head_dim": sizes["head_dim"] or None}, pad_token_id=None)


SIXTEEN = {"tp_size": 4, "pp_size": 2, "dp_size": 2, "num_hidden_layers": 24}
LAYOUTS = [
    {},
    {"tp_size": 1, "sequence_parallel": False, "pp_size": 1, "dp_size": 1},
    {**SIXTEEN, "dp_engine": "zero3", "activation_checkpointing": "full"},
    {**SIXTEEN, "dp_engine": "bucket", "pp_engine": "zbv", "dtype": "float32"},
    {**SIXTEEN, "pp_engine": "interleaved_1f1b", "pp_chunks": 3, "activation_checkpointing": "selective"},
    {**SIXTEEN, "cp_size": 2, "cp_engine": "ulysses", "dtype": "float64", "tie_word_embeddings": True},
    {**SIXTEEN, "cp_size": 4, "pp_engine": "dualpipev", "head_dim": 64, "vocab_size": 50257},
]


@pytest.mark.parametrize("changes", LAYOUTS)
def test_memory_is_that_of_the_trainer(changes: dict[str, Any]) -> None:
    config, model = trained(**changes)
    expected = rank_memory(config, model, check_layout(config, model))
    ranks = ask("memory", **changes)["ranks"]
    assert len(ranks) == len(expected) == config.distributed.pp_size
    for rank, memory in zip(ranks, expected, strict=True):
        assert {name: rank[name] for name in vars(memory)} == vars(memory)
        assert rank["total"] == memory.total


def test_memory_of_the_pages_models_is_that_of_their_files() -> None:
    """The defaults are a model of the pages. By hand: 18 bytes per parameter of Llama 3.1 8B on one GPU."""
    model = load_model_config(trained()[0].model)
    assert {key: getattr(model, key) for key in MODEL if key != "head_dim"} == {
        key: value for key, value in vars(MemoryRequest()).items() if key in MODEL and key != "head_dim"
    }
    result = ask("memory", tp_size=1, sequence_parallel=False, pp_size=1, dp_size=1)
    (rank,) = result["ranks"]
    assert rank["weights"] + rank["gradients"] + rank["optimizer"] == 18 * 8_030_261_248
    assert (result["gpus"], result["parameters"], result["tokens"]) == (1, 8_030_261_248, 8 * 4096)


def test_mistakes_are_those_that_the_trainer_finds() -> None:
    """Over a grid of sizes, the tab refuses a layout if and only if the trainer does, and names a control for it."""
    grid = {
        "num_attention_heads": (8, 12),
        "num_key_value_heads": (2, 4),
        "intermediate_size": (96, 160),
        "head_dim": (0, 12),
        "tp_size": (1, 2, 3, 8),
        "sequence_parallel": (False, True),
        "cp_size": (1, 2, 3),
        "cp_engine": ("ring", "ulysses"),
        "seq_length": (48, 60),
    }
    fixed = {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 100, "pp_size": 1, "dp_size": 1}
    found: set[str] = set()
    for values in itertools.product(*grid.values()):
        request = {**fixed, **dict(zip(grid, values, strict=True))}
        result = ask("memory", **request)
        assert ("error" in result) == is_refused(**request), (request, result)
        if "error" in result:
            found.add(result["field"])
    assert found == {"tp_size", "seq_length", "cp_size", "cp_engine"}


def is_refused(**request: Any) -> bool:
    """Return whether the trainer refuses a request."""
    try:
        check_layout(*trained(**request))
    except UserError:
        return True
    return False


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"tp_size": 3}, "tp_size", "3 ranks cannot split the heads and the MLP; use one of [1, 2, 4, 8, 16, 32]"),
        ({"cp_size": 3}, "seq_length", "4096 tokens cannot be split; use a multiple of 6"),
        (
            {"num_attention_heads": 24},
            "num_attention_heads",
            "24 heads do not divide the hidden size 4096; enter a head",
        ),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "5 key/value heads do not divide the 32 query heads"),
        ({"pp_size": 64}, "pp_engine", "pp_size=64 with 1 chunk(s) per pp rank needs at least 64 layers"),
        ({"pp_engine": "looped_bfs", "pp_chunks": 17}, "pp_engine", "pp_size=2 with 17 chunk(s) per pp rank needs"),
    ],
)
def test_mistakes_name_their_control(changes: dict[str, Any], field: str, message: str) -> None:
    result = ask("memory", **changes)
    assert result["field"] == field
    assert result["error"].startswith(message)


@pytest.mark.slow
def test_scoreboard_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under all settings that admit the schedule, with the entries of docs/schedules."""
    schedule = build("zb_h1", 4, 4)
    (tmp_path / "own.csv").write_text(text := as_csv(schedule.programs))
    drawing.main(["score", str(tmp_path / "own.csv"), "docs/schedules/v_min_4_4.csv"])
    printed = capsys.readouterr().out.strip().split("\n\n")
    results = [ask("score", schedule="csv", text=text, setting=0)]
    results += [ask("score", schedule="csv", text=text, setting=i) for i in range(1, results[0]["count"])]
    admitted = [each for each in results if any(score["name"] == "yours" for score in each["scores"])]
    assert len(admitted) == len(printed) == 4
    for table, result in zip(printed, admitted, strict=True):
        title, _, *rows = table.splitlines()
        assert title.endswith(f"{result['times']} times; no step can take less than {result['bound']:.5g}")
        shown = [(score["place"], f"{score['step_time']:.5g}", f"{score['peak']:g}") for score in result["scores"]]
        assert shown == [(int(row.split()[0]), row.split()[-3], row.split()[-1]) for row in rows]
    assert all(any(score["name"] == "V-Min" for score in result["scores"]) for result in results[:8])


def test_scoreboard_explains_what_it_does_not_rank() -> None:
    assert ask("score", schedule="1f1b", pp=5, setting=0)["error"].startswith("no setting has pp=5 and microbatches=8;")
    many = ask("score", schedule="interleaved_1f1b", chunks=3, setting=0)
    assert many["error"] == "the schedule has 3 stages per pp rank; the settings allow at most 2"
    assert ask("score", schedule="csv", text="0F0", setting=0)["error"].startswith("pp rank 0 lacks")
