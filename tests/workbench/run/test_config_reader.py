"""Reading a config from files (including those of other trainers) and the command line; its schema and its help."""

import json
import logging
from pathlib import Path

import pytest

from picotron.console import UserError
from tests.support.oracle import config_data, make_config
from workbench.run.config_reader import json_schema, leaf_keys, load_config, parse_config

# what Hugging Face's picotron has, and this config does not
OTHER_TRAINERS = {
    "model": {"name": "HuggingFaceTB/SmolLM-360M-Instruct", "num_hidden_layers": 16, "use_fused_adam": True},
    "dataset": {"name": "roneneldan/TinyStories", "subset_name": None, "num_workers": 0, "num_proc": 4},
    "environment": {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "FLASH_ATTEN": "1",
        "HF_TOKEN": "hf_abcdefghijklmnop",
    },
}


def write(folder: Path, data: object) -> str:
    """Write a config file, and return its path."""
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_overrides_may_have_equals_signs_and_earlier_names(tmp_path: Path) -> None:
    words = ["--checkpoint.save_dir=a=b", "--dataset.num_workers", "2", "--distributed.pp_chunks", "3"]
    config = load_config(["--config", write(tmp_path, config_data()), *words])
    assert config.schedule.pp_chunks == 3  # the earlier place; the other key before it is ignored
    assert config.checkpoint.save_dir == "a=b"


def test_config_of_another_trainer_loads_with_warnings_and_without_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse_config(json.loads(json.dumps(OTHER_TRAINERS)))
    assert [line.split(" ")[0].split("=")[0] for line in caplog.messages] == [
        "dataset.num_workers",
        "environment.TOKENIZERS_PARALLELISM",
        "environment.FLASH_ATTEN",
        "environment.HF_TOKEN",
    ]
    assert config.model.num_hidden_layers == 16
    assert config.environment.OMP_NUM_THREADS == 1
    assert "hf_abc" not in caplog.text + config.model_dump_json()
    with pytest.raises(UserError) as error:  # an error does not print the value of a misspelt key either
        make_config(environment__HFTOKEN="hf_abcdefghijklmnop")
    assert "hf_abc" not in str(error.value)


def test_schema_file_is_up_to_date() -> None:
    written = json.loads(Path("template/config.schema.json").read_text())
    assert written == json.loads(json.dumps(json_schema())), "out of date; run `make schema`"


def test_help_lists_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"], "A program.")
    text = capsys.readouterr().out
    assert all(f"--{key} " in text for key in leaf_keys())
    assert "A program." in text
    assert "--explain" not in text  # which only train.py has


def test_names_in_a_file_are_found_beside_it_and_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in the current folder come first; hub ids, and words of the command line, stay as they are."""
    (tmp_path / "above" / "model").mkdir(parents=True)
    (tmp_path / "above" / "configs" / "texts").mkdir(parents=True)
    (tmp_path / "elsewhere" / "here").mkdir(parents=True)
    path = tmp_path / "above" / "configs" / "config.json"
    model, dataset = (
        {"name": "model", "tokenizer": "here"},
        {"name": "texts", "eval_name": "owner/texts", "mixture": {"texts": 2.0}},
    )
    path.write_text(json.dumps({"model": model, "dataset": dataset, "training": {"eval_frequency": 1}}))
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(["--config", str(path)])
    assert (config.model.name, config.model.tokenizer) == (str(tmp_path / "above" / "model"), "here")
    assert config.dataset.name == str(tmp_path / "above" / "configs" / "texts")
    assert config.dataset.eval_name == "owner/texts"
    assert config.dataset.weights == {config.dataset.name: 2.0}
    assert load_config(["--config", str(path), "--model.name", "model"]).model.name == "model"
