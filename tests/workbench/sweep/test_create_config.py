"""create_config.py: which configs it writes, into which folders, with which forecasts, and what it rejects."""

import dataclasses
import itertools
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import create_config
from tests.support.jobs import SHELL_SYNTAX
from tests.support.oracle import config_data
from workbench.explain.hardware import HARDWARE
from workbench.run.config_reader import load_config
from workbench.sweep.combinations import folder_names
from workbench.sweep.jobs import Job, find_jobs

KEYS = {"model__dtype": "float32", "training__seq_length": 64, "training__micro_batch_size": 1}


def base_file(folder: Path, **changes: Any) -> str:
    """Write a base config: that of `config_data`, with KEYS and the changes. Returns its path."""
    path = folder / "base.json"
    path.write_text(json.dumps({"$schema": "config.schema.json", **config_data(**KEYS | changes)}))
    return str(path)


def create(folder: Path, *words: Any, exp_name: str = "exp", base: str | None = None) -> Path:
    """Run create_config.py, by default on BASE. Returns the folder of the run or sweep."""
    arguments = ["--config", base or base_file(folder), "--out_dir", str(folder / "out"), "--exp_name", exp_name]
    create_config.main([*arguments, *map(str, words)])
    return folder / "out" / exp_name


def configs(folder: Path, kind: str = "config_file") -> dict[str, dict[str, Any]]:
    """Read the configs of a sweep, or other files of its jobs, by the names of the jobs."""
    return {job.name: json.loads(getattr(job, kind).read_text()) for job in find_jobs(folder)}


def error_message(folder: Path, *words: Any, **options: Any) -> str:
    """Run create_config.py, which should fail. Returns its error message."""
    with pytest.raises(SystemExit) as error:
        create(folder, *words, **options)
    assert str(error.value).startswith("error: ")
    return str(error.value)


def test_world_size_16_writes_every_combination_that_can_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny Llama has 8 heads, 4 key/value heads and 4 layers."""
    engines, batches = ("afab", "1f1b", "interleaved_1f1b", "zbv"), (1, 2, 4)
    folder = create(tmp_path, "--world_size", 16, "--mbs", *batches, "--pp_engine", *engines, "--global_batch_size", 16)
    expected, total = set(), 0
    for dp, pp, cp, tp in itertools.product(range(1, 17), repeat=4):
        if dp * pp * cp * tp != 16:
            continue
        for engine, mbs in itertools.product(engines, batches):
            total += 1
            chunks = 1 if engine in ("afab", "1f1b") or pp == 1 else 2
            if tp <= 8 and pp * chunks <= 4 and 64 % (2 * cp) == 0 and 16 % (dp * mbs) == 0:
                name = f"dp{dp}_pp{pp}_cp{cp}_tp{tp}_pp_engine{engine.replace('_', '-')}_mbs{mbs}"
                expected.add(name)
                config = load_config(["--config", str(folder / name / "config.json")])
                assert config.checkpoint.save_dir == str(folder / name / "run")
                assert config.global_batch_size == 16
                d = config.distributed
                assert (d.dp_size, d.pp_size, d.cp_size, d.tp_size, d.pp_engine) == (dp, pp, cp, tp, engine)
    assert configs(folder).keys() == expected
    assert f"{total - len(expected)} of {total} combinations left out" in capsys.readouterr().out


def test_config_is_the_base_config_with_the_values_of_the_flags_and_without_its_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--tp 2 --pp 2 --pp_engine zb_h1 --num_hidden_layers 6 --mbs 7 --seq_len 32 --subset_name 42 --use_wandb"
    words += " --use_fused_adam false --training.learning_rate 1e-3 --logging.trace_steps [1,2]"
    words += " --environment.OMP_NUM_THREADS 1"
    folder = create(tmp_path, *words.split(), base=base_file(tmp_path, environment__HF_TOKEN="hf_secret"))
    changes = {"tp_size": 2, "pp_size": 2, "pp_engine": "zb_h1", "model__num_hidden_layers": 6}
    changes |= {"training__micro_batch_size": 7, "training__seq_length": 32, "dataset__subset_name": "42"}
    changes |= {"logging__use_wandb": True, "model__use_fused_adam": False, "training__learning_rate": 1e-3}
    changes |= {"logging__trace_steps": [1, 2], "environment__OMP_NUM_THREADS": 1}
    changes |= {"checkpoint__save_dir": f"{folder}/run"}
    assert configs(folder) == {"exp": config_data(**KEYS | changes)}
    assert not any(b"hf_secret" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert "hf_secret" not in "".join(capsys.readouterr())


def test_experts_are_split_over_all_numbers_of_ranks_that_divide_them(tmp_path: Path) -> None:
    """The tiny model has 8 experts. A sweep of the tiny Llama has no ep_size, see the tests above."""
    base = base_file(tmp_path, model__name="docs/tiny-experts")

    def names(*words: Any) -> set[str]:
        return set(configs(create(tmp_path, "--world_size", 4, *words, base=base, exp_name=f"sweep{len(words)}")))

    assert {name for name in names() if "ep4" in name} == {f"dp{dp}_pp1_cp{4 // dp}_tp1_ep4" for dp in (1, 2, 4)}
    assert names("--tp", 2) == {"sweep2"}
    assert names("--tp", 2, "--ep", 1, 2) == {"ep1", "ep2"}
    words = ("--world_size", 4, "--global_batch_size", 8, "--hardware", "H100", "--best", 1)
    assert "no forecast" in error_message(tmp_path, *words, base=base)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--world_size 8 --tp 1 2 4", {(4, 2, 1, 1), (2, 2, 1, 2), (1, 2, 1, 4)}),
        ("--world_size 8 --dp 4 --tp 1 2", {(4, 2, 1, 1)}),
        ("--world_size 4 --distributed.pp_size 4 1", {(1, 4, 1, 1), (4, 1, 1, 1)}),
        ("--tp 1 2", {(5, 2, 1, 1), (5, 2, 1, 2)}),
    ],
)
def test_axes_without_a_flag_come_from_the_base_config_except_dp(
    tmp_path: Path, words: str, expected: set[tuple[int, ...]]
) -> None:
    """With --world_size, dp is the quotient of the world size and the other three axes."""
    folder = create(tmp_path, *words.split(), base=base_file(tmp_path, pp_size=2, dp_size=5))
    axes = [f"{axis}_size" for axis in ("dp", "pp", "cp", "tp")]
    assert {tuple(c["distributed"].get(axis, 1) for axis in axes) for c in configs(folder).values()} == expected


# ------------------------------------------------------------------------------------------------------------- folders


def test_the_printed_command_quotes_the_name_of_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create(tmp_path, "--tp", 1, 2, exp_name=SHELL_SYNTAX)
    assert configs(folder).keys() == {"tp1", "tp2"}
    python, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert Path(python).samefile(sys.executable)
    assert words == ["submit_slurm_jobs.py", "--inp_dir", str(folder), "--local"]


def test_different_combinations_have_different_folder_names_without_shell_syntax() -> None:
    values = ["1", "1_b2", "2", "1-b2", "1 b2", "x" * 300, "x" * 299, "", " ", "a", "A", SHELL_SYNTAX, "a/../..", "é"]
    names = folder_names([{"logging.run_name": a, "dataset.name": b, "model.name": b} for a in values for b in values])
    assert len({name.lower() for name in names}) == len(values) ** 2
    assert names[0].startswith("run_name1_dataset_name1_model_name1")
    assert max(map(len, names)) < 200
    assert all(shlex.quote(name) == name and "/" not in name for name in names)


def test_existing_configs_are_never_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create(tmp_path, "--tp", 1, 2)
    first = Job(folder / "tp1", "tp1")
    first.run_folder.mkdir()
    (first.run_folder / "metrics.jsonl").write_text("metrics of the first config\n")
    first.set_status("completed")

    def contents(folder: Path) -> dict[Path, bytes]:
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before, other = contents(first.folder), ("--tp", 1, 8, "--training.seed", 5)
    create(tmp_path, "--tp", 1, 2, 4)
    assert f"3 configs in {folder}: 1 written, 2 unchanged" in capsys.readouterr().out
    assert f"1 existing configs differ from the new ones, such as {first.config_file};" in error_message(
        tmp_path, *other
    )
    first.set_status("running")
    assert "is running; cancel it" in error_message(tmp_path, *other, "--overwrite")
    assert not (folder / "tp8").exists()
    first.set_status("completed")
    assert contents(first.folder) == before
    create(tmp_path, *other, "--overwrite")
    assert contents(first.folder / "earlier.1") == before
    assert sorted(path.name for path in first.folder.iterdir()) == ["config.json", "earlier.1"]
    assert [configs(folder)[name]["training"].get("seed") for name in ("tp1", "tp2", "tp8")] == [5, None, 5]


def test_sweep_and_single_run_cannot_share_a_folder(tmp_path: Path) -> None:
    create(tmp_path, "--tp", 1, 2)
    assert "already holds a sweep" in error_message(tmp_path, "--tp", 1)
    folder = create(tmp_path, "--tp", 1, exp_name="one")
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    create(tmp_path, "--tp", 1, exp_name="one")
    assert "already holds a single run" in error_message(tmp_path, "--tp", 1, 2, exp_name="one")


# ----------------------------------------------------------------------------------------------------------- forecasts

EIGHT = ("--world_size", 8, "--global_batch_size", 16, "--hardware", "H100", "--model.dtype", "bfloat16")


def test_best_writes_the_fastest_layouts_with_their_forecasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = create(tmp_path, *EIGHT, "--best", 3, "--mbs", 1, "--distributed.dp_engine", "bucket")
    written, words = configs(folder), capsys.readouterr().out.split()
    names = sorted(written, key=words.index)
    found = configs(folder, "forecast_file")
    times = [found[name]["step_time"] for name in names]
    assert times == sorted(times)
    layouts = set()
    for data in written.values():
        layout = data["distributed"]
        sizes = [layout[f"{axis}_size"] for axis in ("dp", "pp", "cp", "tp")]
        assert math.prod(sizes) == 8
        layouts.add((*sizes, layout["pp_engine"]))
        assert not layout["use_cpu"]
        assert layout["sequence_parallel"] == (layout["tp_size"] > 1)
        assert data["training"]["gradient_accumulation_steps"] * layout["dp_size"] == 16
    assert len(layouts) == len(names) == 3
    assert "MFU" in words
    for each in found.values():
        assert each["step_time"] == pytest.approx(sum(each["seconds"].values()))
        assert each["tokens_per_second_per_gpu"] * each["step_time"] * 8 == pytest.approx(16 * 64)
        assert 0 < each["mfu"] < 1
        assert 0 < each["memory_gb"] < 1


def test_forecasts_are_for_the_device_of_the_hardware(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template is for CPUs, in float32: a GPU means bfloat16, unless a config or a flag says otherwise. Without
    --hardware, --best measures this machine.
    """
    on_cpu = dataclasses.replace(HARDWARE["H100"], name="my processor", cores=2)
    monkeypatch.setattr(create_config, "find_hardware", lambda name, _: {"this": on_cpu, **HARDWARE}[name])
    words = (
        "--world_size 8 --global_batch_size 32 --tp 1 2 --pp 1 --cp 1 --mbs 1 --distributed.dp_engine zero3 --best 2"
    )

    def plan(name: str, *more: str) -> tuple[set[bool], str]:
        create_config.main(["--out_dir", str(tmp_path), "--exp_name", name, *words.split(), *more])
        on_cpus = {each["distributed"]["use_cpu"] for each in configs(tmp_path / name).values()}
        return on_cpus, capsys.readouterr().out

    on_cpus, output = plan("default", "--hardware", "H100")
    assert (on_cpus, "Forecast in bfloat16 on NVIDIA H100 80GB HBM3:" in output) == ({False}, True)
    on_cpus, output = plan("own", "--hardware", "H100", "--config", "template/base_config.json")
    assert (on_cpus, "Forecast in float32 on NVIDIA" in output) == ({False}, True)
    on_cpus, output = plan("this")
    assert (on_cpus, "Forecast in float32 on my processor" in output) == ({True}, True)
