"""Metrics of a run: peaks of devices, the fields of metrics.jsonl, and the handling of NaN, earlier runs and wandb."""

import json
import math
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conformance.worker_pool import WorkerPool
from picotron.console import UserError
from picotron.process_group_manager import setup_process_group_manager
from tests.support import program
from tests.support.messages import error_of
from tests.support.oracle import make_config, tiny_llama
from tests.support.samples import read_jsonl
from tests.support.training import CPU
from workbench.run.checkpoint.checkpoint import Checkpoint
from workbench.run.metrics import Metrics, Progress, evaluation_record, peak_flops
from workbench.run.run_folder import (
    begin_run,
    checkpoint_folders,
    claim_save_dir,
    read_records,
    write_record,
)

FIELDS = [
    "step", "loss", "grad_norm", "learning_rate", "tokens", "step_time", "tokens_per_second",
    "tokens_per_second_per_gpu", "mfu", "memory_gb",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
    ],
)
def test_peak_flops_is_exact_for_known_devices_and_none_for_others(name: str, expected: float | None) -> None:
    assert peak_flops(name, torch.bfloat16) == expected
    assert peak_flops(name, torch.float32) is None


def log_steps(folder: str, losses: list[float], wandb: bool = False, checkpoint: Any = None) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    setup_process_group_manager(1, 1, 1, dist.get_world_size())
    config = make_config(
        checkpoint__save_dir=folder,
        distributed__dp_size=dist.get_world_size(),
        logging__use_wandb=wandb,
        training__seq_length=8,
    )
    resumed = Checkpoint.state_in(checkpoint, folder) if checkpoint else None
    records = begin_run(config, resumed.step if resumed else None) if dist.get_rank() == 0 else []
    metrics = Metrics(config, tiny_llama(), CPU, torch.float64, records, resumed)
    progress = Progress(resumed.step if resumed else 0)
    for loss in losses:
        metrics.start_step()
        progress = progress.after_step(config)
        mine = torch.tensor(loss + dist.get_rank(), dtype=torch.float64)  # on two ranks, the mean is loss + 0.5
        metrics.log(metrics.end_step(progress, mine, torch.tensor(2.0, dtype=torch.float64), 0.1)[0])
    metrics.close()


def checkpoint_of(folder: Path, step: int, wandb_run_id: str | None) -> Any:
    """Return what a run reads of a checkpoint."""
    state = types.SimpleNamespace(step=step, wandb_run_id=wandb_run_id)
    return types.SimpleNamespace(folder=folder / f"step_{step:08d}", state=state)


def test_metrics_file_has_the_global_mean_in_full_precision(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(log_steps, 2, str(tmp_path / "deep" / "run"), [math.pi, math.e])
    lines = read_jsonl(tmp_path / "deep/run/metrics.jsonl")
    assert [list(line) for line in lines] == [FIELDS, FIELDS]
    assert [line["loss"] for line in lines] == [math.pi + 0.5, math.e + 0.5]
    assert [line["tokens"] for line in lines] == [32, 64]
    for line in lines:
        assert line["tokens_per_second"] == 32 / line["step_time"]
        assert line["tokens_per_second_per_gpu"] == line["tokens_per_second"] / 2
        assert line["mfu"] is None
        assert 0.05 < line["memory_gb"] < 10
    assert json.loads((tmp_path / "deep/run/config.json").read_text())["training"]["seq_length"] == 8


@pytest.mark.processes
@pytest.mark.slow
def test_the_memory_is_that_of_the_process_and_not_of_the_one_that_started_it() -> None:
    large = b"x" * 10**9
    code = "import torch; from workbench.run.metrics import memory_gb; print(memory_gb(torch.device('cpu')))"
    assert 0.05 < float(program.run("-c", code).stdout) < len(large) / 1.1e9


def test_an_earlier_run_in_the_same_folder_is_kept(tmp_path: Path) -> None:
    config = make_config(checkpoint__save_dir=str(tmp_path))
    names = ("metrics.jsonl", "completions.jsonl", "config.json", "schedule.csv", "trace_step_00000001.jsonl")
    for run in ("1", "2", "3"):
        begin_run(config, None, run)
        for name in names:
            (tmp_path / name).write_text(run)
    for name in names:
        found = {path.parent.name: path.read_text() for path in tmp_path.rglob(name)}
        assert found == {"earlier.1": "1", "earlier.2": "2", tmp_path.name: "3"}


def test_resumed_run_keeps_its_records_up_to_the_checkpoint(tmp_path: Path) -> None:
    config, file = make_config(checkpoint__save_dir=str(tmp_path)), tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "{key}": 1.0}}\n' for step, key in ((1, "loss"), (2, "accuracy"), (3, "loss"))]
    file.write_text("".join(lines) + '{"step": 4, "lo')  # an incomplete line, as a killed run may leave
    for step in (1, 2, 10**8):
        (tmp_path / f"step_{step:08d}").mkdir()
    assert [*checkpoint_folders(tmp_path)] == [1, 2, 10**8]
    assert len(begin_run(config, 2, "a schedule")) == 3
    assert file.read_text() == "".join(lines[:2])
    # What a resume archives does not grow with the number of steps before it.
    assert (tmp_path / "earlier.1" / "metrics.jsonl").read_text() == "".join(lines[1:])
    # Checkpoints after the resumed step are moved aside with their records.
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]
    assert sorted(path.name for path in (tmp_path / "earlier.1").iterdir()) == ["metrics.jsonl", "step_100000000"]
    # Records of later steps are kept even if no checkpoint of them is.
    (tmp_path / "step_00000002").rmdir()
    begin_run(config, 1)
    assert (tmp_path / "earlier.2" / "metrics.jsonl").read_text() == "".join(lines[:2])
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"config.json", "metrics.jsonl"}
    with mock.patch("workbench.run.run_folder.read_records", wraps=read_records) as read:
        begin_run(config, 1)
    assert not (tmp_path / "earlier.3").exists()
    assert read.call_count == 1  # the archives are for wandb


def test_records_without_a_field_are_not_parsed(tmp_path: Path) -> None:
    """A checkpoint with `keep_best` reads the evaluations of a long run only."""
    (file := tmp_path / "metrics.jsonl").write_text('{"step": 1}\n"loss"\n{"step": 3, "eval_loss": 2.0}\n')
    assert read_records(file, "eval_loss") == ([{"step": 3, "eval_loss": 2.0}], "")  # line 2 would be a problem


def test_a_record_without_a_step_is_not_written(tmp_path: Path) -> None:
    assert "'step'" in error_of(lambda: write_record(tmp_path / "a", {"accuracy": 0.5}))


@pytest.mark.usefixtures("_one_rank")
def test_a_run_that_resumes_at_its_end_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 4.0}\n')
    with caplog.at_level("INFO"):
        log_steps(str(tmp_path), [], checkpoint=checkpoint_of(tmp_path, 2, None))
    assert "no steps were run" in caplog.text


def refused(folder: str, last: dict[int, float]) -> str:
    return error_of(lambda: log_steps(folder, [1.0, last.get(dist.get_rank(), 1.0)]))


@pytest.mark.parametrize(
    ("last", "advice"),
    [
        ({0: math.nan, 1: math.nan}, "try a lower learning_rate than 0.1"),
        ({1: math.nan}, "only rank 1 computed such a loss"),
    ],
)
def test_a_nan_stops_the_run_on_every_rank(
    pool: WorkerPool, tmp_path: Path, last: dict[int, float], advice: str
) -> None:
    for message in pool.run(refused, 2, str(tmp_path), last):
        assert message.startswith(f"step 2: loss is nan; {advice}")
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_unwritable_folder_and_model_folder_are_rejected_as_save_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory; choose another folder"):
        claim_save_dir(make_config(checkpoint__save_dir=f"{tmp_path}/file/run"))
    tiny_llama().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"is a model folder, and its config\.json must be kept; choose another"):
        claim_save_dir(make_config(checkpoint__save_dir=f"{tmp_path}/model"))
    claim_save_dir(make_config(checkpoint__save_dir=f"{tmp_path}/deep/new/folder"))
    assert [path.name for path in (tmp_path / "deep/new/folder").iterdir()] == [".run_lock"]


def test_a_run_does_not_archive_its_own_model(tmp_path: Path) -> None:
    """A second round of fine-tuning that starts from a checkpoint of the first, and writes to its folder."""
    (checkpoint := tmp_path / "run" / "step_00000040").mkdir(parents=True)
    keys = {"model__name": str(checkpoint), "checkpoint__save_dir": f"{tmp_path}/run"}
    with pytest.raises(UserError, match=r"model\.name='.*step_00000040' is in checkpoint\.save_dir=.*; choose another"):
        claim_save_dir(make_config(**keys))
    claim_save_dir(make_config(**keys, checkpoint__load_path=str(checkpoint)))
    claim_save_dir(make_config(**keys | {"checkpoint__save_dir": f"{tmp_path}/other"}))


def log_with_wandb(folder: str, login: str, checkpoint: Any = None) -> dict[str, Any]:
    calls = {"logged": []}
    fake = types.ModuleType("wandb")
    fake.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    fake.login = lambda prompt, verify: login != "none"
    fake.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online", project="theirs"))

    def init(**arguments: Any) -> Any:
        if login == "no network" and "mode" not in arguments:
            raise fake.errors.Error("cannot reach the server")
        calls.update(arguments)
        return types.SimpleNamespace(
            id="an id",
            log=lambda record, step: calls["logged"].append((step, record["loss"])),
            finish=lambda: calls.update(done=True),
        )

    fake.init = init
    with mock.patch.dict(sys.modules, wandb=fake):
        log_steps(folder, [1.0, 2.0], wandb=True, checkpoint=checkpoint)
    return calls


@pytest.mark.parametrize("login", ["good", "none", "no network"])
def test_wandb_logs_on_rank_0_and_falls_back_to_offline(pool: WorkerPool, tmp_path: Path, login: str) -> None:
    first, second = pool.run(log_with_wandb, 2, str(tmp_path), login)
    assert (first["logged"], first["done"]) == ([(1, 1.5), (2, 2.5)], True)
    assert first.get("mode") == (None if login == "good" else "offline")
    assert (first["project"], first["dir"]) == ("theirs", str(tmp_path))  # as WANDB_PROJECT says
    assert first["settings"] == {"init_timeout": 20, "disable_git": True}
    assert second == {"logged": []}  # only rank 0 logs to wandb


@pytest.mark.processes
@pytest.mark.usefixtures("_one_rank")
def test_wandb_itself_records_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"checkpoint__save_dir": str(tmp_path), "logging__use_wandb": True}
    for mode, project, value in (("of", "mine", "of"), ("offline", "team/mine", "team/mine")):
        monkeypatch.setenv("WANDB_MODE", mode)
        with pytest.raises(UserError, match=rf"wandb rejects its settings .*'{value}'.*; correct"):
            Metrics(make_config(**keys, logging__project_name=project), tiny_llama(), CPU, torch.float64)
    Metrics(make_config(**keys), tiny_llama(), CPU, torch.float64).close()
    assert (tmp_path / "wandb").exists()


@pytest.mark.usefixtures("_one_rank")
def test_weights_whose_evaluation_is_not_finite_are_an_error_before_they_are_saved() -> None:
    with pytest.raises(UserError, match="evaluation set is nan"):
        evaluation_record(torch.tensor(math.nan), 1, 1)


def test_resumed_run_continues_its_wandb_run(pool: WorkerPool, tmp_path: Path) -> None:
    def resumed(folder: Path, step: int) -> tuple[dict[str, Any], list[int]]:
        (calls,) = pool.run(log_with_wandb, 1, str(folder), "good", checkpoint_of(tmp_path, step, "abc"))
        return {key: calls[key] for key in ("id", "resume", "group") if key in calls}, [s for s, _ in calls["logged"]]

    assert resumed(tmp_path, 3) == ({"id": "abc", "resume": "allow"}, [4, 5])
    assert resumed(tmp_path, 4) == ({"group": "abc"}, [4, 5, 6])  # wandb has step 5, and would ignore another one
    begin_run(make_config(checkpoint__save_dir=str(tmp_path)), 5)  # a resume that is killed before its first step
    assert resumed(tmp_path, 5) == ({"group": "abc"}, [4, 5, 6, 7])
    assert resumed(tmp_path / "other", 4) == ({}, [1, 2])
