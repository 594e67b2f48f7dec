"""create_config.py: which configs it writes, which arguments it rejects, and that the written configs train."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import create_config
from workbench.run.config_reader import load_config
from workbench.sweep.jobs import find_jobs

BASE: dict[str, Any] = {
    "$schema": "config.schema.json",
    "distributed": {"use_cpu": True},
    "model": {"name": "template/tiny-llama", "dtype": "float32"},
    "training": {"seq_length": 64, "total_train_steps": 2},
    "dataset": {"name": "python-stdlib"},
}


def base_file(folder: Path, **changes: Any) -> str:
    """Write a base config: BASE, with the changes `section={...}`. Returns its path."""
    path = folder / "base.json"
    path.write_text(json.dumps(BASE | {section: BASE[section] | keys for section, keys in changes.items()}))
    return str(path)


def create(folder: Path, *words: Any, exp_name: str = "exp", base: str | None = None) -> Path:
    """Run create_config.py, by default on BASE. Returns the folder of the run or sweep."""
    arguments = ["--config", base or base_file(folder), "--out_dir", str(folder / "out"), "--exp_name", exp_name]
    create_config.main([*arguments, *map(str, words)])
    return folder / "out" / exp_name


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the configs of a sweep, by the names of their jobs."""
    return {job.name: json.loads(job.config_file.read_text()) for job in find_jobs(folder)}


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
    expected, total = {}, 0
    for dp, pp, cp, tp in itertools.product(range(1, 17), repeat=4):
        if dp * pp * cp * tp != 16:
            continue
        for engine, mbs in itertools.product(engines, batches):
            total += 1
            chunks = 1 if engine in ("afab", "1f1b") or pp == 1 else 2
            if tp <= 8 and pp * chunks <= 4 and 64 % (2 * cp) == 0 and 16 % (dp * mbs) == 0:
                name = f"dp{dp}_pp{pp}_cp{cp}_tp{tp}_pp_engine{engine.replace('_', '-')}_mbs{mbs}"
                expected[name] = (dp, pp, cp, tp, engine, mbs, 16 // (dp * mbs))
    assert total == 35 * 12
    assert len(expected) > 200
    written = {}
    for name in configs(folder):
        config = load_config(["--config", str(folder / name / "config.json")])
        assert config.checkpoint.save_dir == str(folder / name / "run")
        assert config.global_batch_size == 16
        d, t = config.distributed, config.training
        sizes = (d.dp_size, d.pp_size, d.cp_size, d.tp_size)
        written[name] = (*sizes, d.pp_engine, t.micro_batch_size, t.gradient_accumulation_steps)
    assert written == expected
    assert f"{total - len(expected)} of {total} combinations left out" in capsys.readouterr().out


def test_config_is_the_base_config_with_the_values_of_the_flags(tmp_path: Path) -> None:
    folder = create(
        tmp_path, "--tp", 2, "--cp", 1, "--dp", 3, "--pp", 2, "--pp_engine", "zb_h1", "--num_hidden_layers", 6,
        "--num_attention_heads", 4, "--num_key_value_heads", 2, "--grad_acc_steps", 5, "--mbs", 7, "--seq_len", 32,
        "--subset_name", "42", "--use_wandb", "--use_fused_adam", "false", "--training.learning_rate", "1e-3",
        "--logging.trace_steps", "[1, 2]", "--model_name", "template/tiny-llama",
    )  # fmt: skip
    assert configs(folder) == {
        ".": {
            "distributed": {"use_cpu": True, "dp_size": 3, "pp_size": 2, "cp_size": 1, "tp_size": 2, "pp_engine": "zb_h1"},
            "model": BASE["model"] | {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "use_fused_adam": False},
            "training": {"seq_length": 32, "total_train_steps": 2, "gradient_accumulation_steps": 5, "micro_batch_size": 7, "learning_rate": 1e-3},
            "dataset": {"name": "python-stdlib", "subset_name": "42"},
            "logging": {"use_wandb": True, "trace_steps": [1, 2]},
            "checkpoint": {"save_dir": f"{folder}/run"},
        }
    }  # fmt: skip


def test_experts_are_split_over_all_numbers_of_ranks_that_divide_them(tmp_path: Path) -> None:
    """The tiny model has 8 experts. A sweep of the tiny Llama has no ep_size, see the tests above."""
    base = base_file(tmp_path, model={"name": "docs/tiny-experts"})

    def sizes(*words: Any, exp_name: str) -> dict[str, tuple[int, int]]:
        written = configs(create(tmp_path, *words, base=base, exp_name=exp_name))
        return {
            name: (each["distributed"]["dp_size"], each["distributed"].get("ep_size", 1))
            for name, each in written.items()
        }

    all_layouts = sizes("--world_size", 2, 4, "--mbs", 1, 2, exp_name="a")
    assert all_layouts["dp2_pp1_cp2_tp1_ep4_mbs1"] == (2, 4)
    ranks = {(dp, cp) for dp in (1, 2, 4) for cp in (1, 2, 4) if dp * cp <= 4}
    assert {name.split("_ep")[0] for name in all_layouts if "ep4" in name} == {
        f"dp{dp}_pp1_cp{cp}_tp1" for dp, cp in ranks if dp * cp == 4
    }
    assert sizes("--world_size", 4, "--tp", 2, exp_name="b") == {".": (2, 1)}
    assert sizes("--world_size", 4, "--tp", 2, "--ep", 1, 2, exp_name="c") == {"ep1": (2, 1), "ep2": (2, 2)}
    assert "no forecast" in error_message(
        tmp_path, "--world_size", 4, "--global_batch_size", 8, "--hardware", "H100", "--best", 1, base=base
    )


def test_axes_without_a_flag_come_from_the_base_config_except_dp(tmp_path: Path) -> None:
    """With --world_size, dp is the quotient of the world size and the other three axes."""
    base = base_file(tmp_path, distributed={"pp_size": 2, "dp_size": 5})

    def sizes(*words: Any, exp_name: str) -> set[tuple[int, ...]]:
        written = configs(create(tmp_path, *words, base=base, exp_name=exp_name)).values()
        axes = ("dp_size", "pp_size", "cp_size", "tp_size")
        return {tuple(c["distributed"].get(axis, 1) for axis in axes) for c in written}

    assert sizes("--world_size", 8, "--tp", 1, 2, 4, exp_name="a") == {(4, 2, 1, 1), (2, 2, 1, 2), (1, 2, 1, 4)}
    assert sizes("--world_size", 8, "--dp", 4, "--tp", 1, 2, exp_name="b") == {(4, 2, 1, 1)}
    assert sizes("--world_size", 1, 2, exp_name="c") == {(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)}  # fmt: skip
    assert sizes("--world_size", 4, "--distributed.pp_size", 4, 1, exp_name="d") == {(1, 4, 1, 1), (4, 1, 1, 1)}
    assert sizes("--tp", 1, 2, exp_name="e") == {(5, 2, 1, 1), (5, 2, 1, 2)}


def test_token_of_the_base_config_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "theirs.json"
    base.write_text(json.dumps(BASE | {"environment": {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "1"}}))
    folder = create(tmp_path, base=str(base))
    assert configs(folder)["."]["environment"] == {"OMP_NUM_THREADS": "1"}
    assert not any(b"hf_secret" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert "hf_secret" not in "".join(capsys.readouterr())
