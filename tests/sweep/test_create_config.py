"""create_config.py: which configs it writes, which arguments it rejects, and that the written configs train."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import create_config
from picotron.command_line import load_config
from picotron.sweep.jobs import find_jobs
from tests.support.jobs import SHELL_SYNTAX
from tests.support.program import metrics, run

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
    output = capsys.readouterr().out
    left_out = [line for line in output.splitlines() if line.startswith("left out ")]
    assert len(left_out) == total - len(expected)
    assert all(len(line.split(": ", 1)[1]) > 30 for line in left_out)
    assert f"{len(expected)} configs in {folder}: {len(expected)} written, 0 unchanged; " in output
    assert f"{total - len(expected)} of {total} combinations left out" in output


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


def test_lists_nulls_and_the_global_batch_size_can_vary(tmp_path: Path) -> None:
    steps = create(tmp_path, "--pp", 2, "--logging.trace_steps", "[1]", "[1,2]", "null")
    assert {name: c["logging"]["trace_steps"] for name, c in configs(steps).items()} == {
        "trace_steps-1-": [1],
        "trace_steps-1-2-": [1, 2],
        "trace_stepsnull": None,
    }
    batches = create(tmp_path, "--global_batch_size", 8, 16, "--mbs", 2, exp_name="batches")
    accumulated = {name: c["training"]["gradient_accumulation_steps"] for name, c in configs(batches).items()}
    assert accumulated == {"global_batch_size8": 4, "global_batch_size16": 8}


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
    message = error_message(tmp_path, "--world_size", 6, 7, "--dp", 4, 5, base=base)
    assert "--world_size 6 or 7: no combination of dp 4|5 x pp 2 x cp 1 x tp 1 has this product; use other" in message


@pytest.mark.parametrize(
    "words",
    [["--hf_token", "hf_secret"], ["--hf_token=hf_secret"], ["--HF-TOKEN", "hf_secret"], ["--environment.HF_TOKEN", "hf_secret"], ["--wandb.token=hf_secret"]],
)  # fmt: skip
def test_token_flags_are_rejected_without_printing_the_token(tmp_path: Path, words: list[str]) -> None:
    message = error_message(tmp_path, *words)
    assert "configs hold no secrets; use `hf auth login`" in message
    assert "hf_secret" not in message
    assert not (tmp_path / "out").exists()


def test_token_of_the_base_config_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "theirs.json"
    base.write_text(json.dumps(BASE | {"environment": {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "1"}}))
    folder = create(tmp_path, base=str(base))
    assert configs(folder)["."]["environment"] == {"OMP_NUM_THREADS": "1"}
    assert not any(b"hf_secret" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert "hf_secret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "3"], "tp_size=3 does not split num_attention_heads=8"),
        (["--pp", "8"], "use fewer stages, or a pp_layout with empty ones"),
        (["--pp", "2", "--pp_engine", "zbw"], "there is no schedule 'zbw'"),
        (["--cp", "3"], "training.seq_length=64 is not divisible by 6"),
        (["--cp", "8", "--distributed.cp_engine", "ulysses"], "cp_engine='ulysses' cannot split the key/value heads"),
        (["--num_key_value_heads", "3"], "num_key_value_heads=3 does not divide num_attention_heads=8"),
        (["--model_name", "no/such/model"], "'no/such/model' has no readable config.json"),
        (["--tp", "two"], 'distributed.tp_size="two"'),
        (["--tp", "3", "5"], "none of the 2 combinations can run"),
        (["--tp", "2", "2"], "--tp contains 2 more than once"),
        (["--tp", "2", "--distributed.tp_size", "2"], "--tp contains 2 more than once"),
        (["--tp"], "--tp needs a value"),
        (["--training.sed", "1"], "unknown key training.sed; did you mean training.seed?"),
        (["--ttp", "1"], "unexpected argument '--ttp'"),
        (["--tp=2", "4"], "unexpected argument '4'"),
        (["--checkpoint.save_dir", "x"], "outputs go to the folder run/"),
        (["--global_batch_size", "8", "--grad_acc_steps", "8"], "already determines --grad_acc_steps; remove"),
        (["--global_batch_size", "9", "--mbs", "2"], "global_batch_size=9 should be a positive multiple of 2"),
        (["--world_size", "0"], "--world_size 0 should be a positive number"),
        (["--world_size", "4", "--tp", "x"], 'distributed.tp_size="x" should be a positive integer'),
    ],
)
def test_invalid_arguments_write_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    assert message in error_message(tmp_path, *words)
    assert not (tmp_path / "out").exists()


def test_mistakes_of_one_config_are_reported_together(tmp_path: Path) -> None:
    message = error_message(tmp_path, "--tp", "3", "--cp", "3", "--training.warmup_steps", "9")
    assert all(
        each in message for each in ("tp_size=3 does not", "seq_length=64 is not", "warmup_steps=9 must", "3 prob")
    )


def test_table_shows_layout_batch_parameters_and_bubble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path, "--pp", 1, 2, "--mbs", 2, "--grad_acc_steps", 4, "--dp", 2)
    header, one, two = capsys.readouterr().out.splitlines()[:3]
    assert header.split() == [
        "dp",
        "pp",
        "cp",
        "tp",
        "sequences/step",
        "tokens/step",
        "parameters/rank",
        "bubble",
        "GiB/rank",
    ]
    assert one.split()[:12] == ["pp1", "2", "1", "1", "1", "16", "=", "2", "x", "2", "x", "4"]
    # 4 layers: 4 (2 D H d + 2 D K d + 3 D F + 2 D), the tied matrix V D, and the last norm D, of 4 bytes each
    D, F, heads, kv, V = 128, 352, 128, 64, 1024
    layer = 2 * D * heads + 2 * D * kv + 3 * D * F + 2 * D
    assert one.split()[12:15] == ["1,024", f"{4 * layer + V * D + D:,}", "0.0%"]
    # 1F1B: each stage is idle while the other one works on one of the 4 micro-batches; the last stage also has the head
    assert two.split()[0] == "pp2"
    assert 0.1 < float(two.split()[14].rstrip("%")) / 100 < 0.3


DATA = "the quick brown fox jumps over the lazy dog, and a sweep trains on it.\n"


def small(tmp_path: Path) -> str:
    """Write a base config that trains within seconds: two small layers and a short text."""
    (tmp_path / "text.txt").write_text(DATA * 3000)
    return base_file(
        tmp_path,
        model={"num_hidden_layers": 2, "tokenizer": "bpe"},
        training={"seq_length": 16},
        dataset={"name": str(tmp_path / "text.txt")},
    )


@pytest.mark.slow
def test_written_configs_train(home: Path, tmp_path: Path) -> None:
    folder = create(tmp_path, "--world_size", 1, "--grad_acc_steps", 1, 2, exp_name=SHELL_SYNTAX, base=small(tmp_path))
    assert sorted(configs(folder)) == ["grad_acc_steps1", "grad_acc_steps2"]
    for name in configs(folder):
        result = run(home, 0, config=str(folder / name / "config.json"))
        assert result.returncode == 0, result.stderr
        assert [line["step"] for line in metrics(folder / name / "run")] == [1, 2]


@pytest.mark.slow
def test_all_layouts_of_two_processes_train_with_equal_losses(home: Path, tmp_path: Path) -> None:
    folder = create(tmp_path, "--world_size", 2, "--global_batch_size", 4, base=small(tmp_path))
    assert sorted(configs(folder)) == sorted(
        f"dp{dp}_pp{pp}_cp{cp}_tp{tp}" for dp, pp, cp, tp in set(itertools.permutations((2, 1, 1, 1)))
    )
    losses = {}
    for name in configs(folder):
        result = run(home, 2, config=str(folder / name / "config.json"))
        assert result.returncode == 0, result.stderr
        losses[name] = [line["loss"] for line in metrics(folder / name / "run")]
    assert all(curve == pytest.approx(losses["dp2_pp1_cp1_tp1"], rel=1e-4) for curve in losses.values())
