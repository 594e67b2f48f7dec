"""Command lines and files that the programs besides train.py may neither accept nor answer with a traceback."""

import csv
import json
import sys
from pathlib import Path

import pytest

import create_config
import submit_slurm_jobs
from tests.support.hostile import assert_rejected
from workbench.drawing import __main__ as drawing
from workbench.generation import program as generate
from workbench.sweep import table as extract_metrics


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the files of an input. `@` in an argument stands for it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


GENERATE_WORDS = [
    "", "--checkpoint", "--checkpoint no/such", "--checkpoint .", "--checkpoint @", "--checkpoint README.md", "--checkpoint /",
    "--checkpoint template/tiny-llama", *(f"--checkpoint template/tiny-llama --{name} {value}" for name in ("temperature", "top_k", "seed", "max_new_tokens")
    for value in ("-1", "nan", "inf", "x", "-1e400", "1e400")), "--checkpoint . --seed 18446744073709551616", "--checkpoint . --max_new_tokens 1000000000000",
]  # fmt: skip


@pytest.mark.parametrize("words", GENERATE_WORDS)
def test_command_lines_of_generate(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", *words.replace("@", str(folder)).split()])
    assert_rejected(generate.main, capsys)


DRAWING_WORDS = [
    "", "none", "schedule", "schedule none", "schedule csv:x", "schedule 1f1b zbv", "csv", "csv no.csv", "csv .", "csv /", "search", "search_measured @ --memory 1",
    "measured", "measured no", "measured .", "measured @", "measured @ --step 0", "measured @ --step x", "measured @ --step 7", "measured @ --step 1" + "0" * 400,
    "generation --groups 0", "generation --tokens 1000000", "generation --chunks x", *(f"schedule 1f1b --{words}" for words in (
    "pp 0", "pp -1", "pp x", "pp 1e3", "pp 100000000", "pp 100000 --micro_batches 100000", "micro_batches 0", "micro_batches 1000000000000", "micro_batches nan",
    "chunks 0", "chunks 2", "group_size 2", "p2p nan", "p2p inf", "pp 1" + "0" * 400, "p2p -1", "p2p x", "deferred -1", "activations", "activations 1",
    "out a.png", "out a", "out /no/such/folder/a.svg", "out /", "out .svg/")),
]  # fmt: skip


@pytest.mark.parametrize("words", DRAWING_WORDS, ids=lambda words: repr(words[:60]))
def test_command_lines_of_drawing(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_rejected(lambda: drawing.main(words.replace("@", str(folder)).split()), capsys)


CREATE_WORDS = [
    "--exp_name", "--exp_name .", "--exp_name ..", "--exp_name a/b", "--exp_name a\0b", "--exp_name a\nb", "--exp_name", "--exp_name= ", "--world_size 0",
    "--world_size -1", "--world_size x", "--world_size 720720", "--world_size 1000000007 --tp 3", "--tp 0", "--tp x", "--tp", "--tp 2 2", "--tp -1",
    "--global_batch_size 7 --dp 2", "--global_batch_size 0", "--global_batch_size x", "--global_batch_size 8 --grad_acc_steps 2", "--mbs 0",
    "--config no.json", "--config .", "--config README.md", "--hf_token hf_secret", "--hf_token=hf_secret", "--wandb_token hf_secret",
    "--environment.HF_TOKEN hf_secret", "--checkpoint.save_dir x", "--unknown 1", "word", "--training.sed 1", "--pp 100000", "--pp_engine none",
    "--model_name no/such", "--out_dir README.md", "--training.learning_rate nan", "--num_hidden_layers 1000000000",
    "--training.seed " + " ".join(map(str, range(10_001))),
]  # fmt: skip


@pytest.mark.parametrize("words", CREATE_WORDS, ids=lambda words: repr(words[:60]))
def test_command_lines_of_create_config(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = [] if words.startswith("--exp_name") else ["--exp_name", "sweep"]
    out = [] if "--out_dir" in words else ["--out_dir", str(folder)]
    message = assert_rejected(lambda: create_config.main([*name, *out, *words.split(" ")]), capsys)
    assert "hf_secret" not in message
    assert list(folder.rglob("config.json")) == []


SUBMIT_WORDS = [
    "", "--inp_dir", "--inp_dir no/such", "--inp_dir README.md", "--inp_dir @/empty", "--local --timeout nan", "--local --timeout 0", "--local --timeout -1",
    "--local --timeout inf", "--local --timeout x", "--grace x", "--only none", "--only", "--local --cancel", "--gpus_per_node 0", "--gpus_per_node x",
    "--env_setup no.sh", "--env_setup .", "--nb_slurm_array 0", "--check_status --dry_run", "--timeout 5",
]  # fmt: skip


@pytest.mark.parametrize("words", SUBMIT_WORDS)
def test_command_lines_of_submit(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").mkdir()
    (folder / "job").mkdir()
    (folder / "job" / "config.json").write_text(Path("template/base_config.json").read_text())
    sweep = [] if words == "" or "--inp_dir" in words else ["--inp_dir", str(folder / "job")]
    assert_rejected(lambda: submit_slurm_jobs.main([*sweep, *words.replace("@", str(folder)).split()]), capsys)


RECORDS = [
    b"", b"\xff\n", b"null\n", b"{}\n", b'{"step": 1, "loss": "x"}\n', b"[" * 100_000 + b"\n", b'{"step": 2, "loss": 1' + b"0" * 400 + b"}\n",
]  # fmt: skip


@pytest.mark.parametrize("content", RECORDS, ids=lambda content: repr(content[:40]))
@pytest.mark.parametrize(
    "file", ["run/metrics.jsonl", "status.txt", "slurm_job_id.txt", "config.json", "run/config.json"]
)
def test_no_file_of_a_run_stops_the_table_of_a_sweep(
    content: bytes, file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"step": 1, "loss": 2.5, "memory_gb": 1.0, "tokens_per_second_per_gpu": 10.0, "mfu": None}
    for name in ("damaged", "intact"):
        (folder / name / "run").mkdir(parents=True)
        (folder / name / "config.json").write_text(Path("template/base_config.json").read_text())
        (folder / name / "status.txt").write_text("completed\n")
        (folder / name / "run" / "metrics.jsonl").write_text(json.dumps(good) + "\n")
    path = folder / "damaged" / file
    path.write_bytes(content + json.dumps(good).encode() + b"\n" if file.endswith("metrics.jsonl") else content)
    if file != "run/metrics.jsonl":
        monkeypatch.setattr(extract_metrics, "draw", lambda *arguments: None)  # the plots show the records only
    extract_metrics.main(["--inp_dir", str(folder), "--warmup", "0"])
    damaged, intact = csv.DictReader((folder / "metrics.csv").open())
    assert (intact["status"], intact["step"], intact["problem"]) == ("completed", "1", "")
    assert damaged["name"] == "damaged"
    if file != "slurm_job_id.txt" and content not in (b"", b"\n"):
        assert damaged["problem"]
