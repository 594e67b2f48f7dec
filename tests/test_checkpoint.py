"""Checkpoints: any layout goes on from what any other wrote, transformers reads them, only whole ones are used."""

import json
import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from picotron import safetensors_folder
from picotron.checkpoint import TrainerState, find_checkpoint
from picotron.checkpoint_writer import CheckpointWriter
from picotron.config import Config, UserError
from picotron.data import Progress
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import Llama
from picotron.optimizer import AdamW
from picotron.pipeline_parallel.plan import make_plan
from picotron.process_group_manager import setup_process_group_manager
from picotron.run_folder import checkpoint_folders
from picotron.tokens import train_bpe
from picotron.weights import materialise
from tests.oracle import (
    assert_close,
    make_config,
    oracle_training,
    random_tokens,
    tiny_llama,
    with_exact_norms,
)
from tests.test_data_parallel import train_steps
from tests.test_pipeline_parallel import all_stages, layout_name
from tests.worker_pool import WorkerPool
from train import build_model

BATCH = 8  # sequences in a global batch, whatever the layout
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter(["def f(x): return x"]), 260).save_pretrained(folder)
    return folder


def run_config(save_dir: Path, layout: dict[str, Any], **changes: Any) -> Config:
    keys = {
        "training__micro_batch_size": BATCH // (2 * layout.get("dp_size", 1)),
        "training__gradient_accumulation_steps": 2,
        "training__warmup_steps": 3,
        "training__max_grad_norm": 0.5,
        "dataset__shuffle": False,
        "checkpoint__save_dir": str(save_dir),
        "checkpoint__save_frequency": 100,  # so only the last step
    }
    return make_config(**{f"distributed__{key}": value for key, value in layout.items()}, **keys | changes)


def first_half(save_dir: Path, layout: dict[str, Any], **changes: Any) -> Config:
    """Of ten steps, by a limit that the learning rate does not know of."""
    return run_config(save_dir, layout, training__max_tokens=5 * BATCH * 16, **changes)


def train(config: Config, model_config: LlamaConfig, tokenizer: Path) -> dict[str, Any]:
    """A run as train.py does it; the losses and gradient norms of its steps, and the whole weights in the end."""
    layout = config.distributed
    setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    checkpoint = find_checkpoint(config, model_config)
    stage = build_model(
        config, model_config, make_plan(config, model_config), CPU, getattr(torch, config.model.dtype), checkpoint
    )
    model = DataParallelBucket(stage, groups=stage.parameters_by_stage())
    losses, norms, _ = train_steps(model, config, model_config, checkpoint=checkpoint, tokenizer=tokenizer)
    return {"losses": losses, "grad_norms": norms, "weights": all_stages(stage.module, "data")}


def run(pool: WorkerPool, config: Config, model_config: LlamaConfig, tokenizer: Path) -> dict[str, Any]:
    return pool.run(train, config.distributed.world_size, config, model_config, tokenizer)[0]


def model_of(tied: bool) -> LlamaConfig:
    """Of 61 tokens, which no tp size divides, and 2 key/value heads, fewer than the ranks of tp 4."""
    return tiny_llama(tie_word_embeddings=tied, num_attention_heads=8)


def tensors_of(folder: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of a kind, read by the safetensors library."""
    return {
        name: t
        for path in sorted(folder.glob(f"{kind}*.safetensors"))
        if path.name[len(kind)] in "-."
        for name, t in load_file(path).items()
    }


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp_size": 2},
    {"tp_size": 2},
    {"pp_size": 2},
    {"cp_size": 2},
    {"tp_size": 4, "sequence_parallel": True},
    {"pp_size": 3, "pp_engine": "afab"},
    {"dp_size": 2, "pp_size": 2, "tp_size": 2},
]
# In `make test` each layout is read once by another one, and one by itself; the other pairs are in `make parity`.
PAIRS = [(i, (i + 3) % 8) for i in range(8)] + [(0, 0)]
PARITY = [(i, j) for i in range(8) for j in range(8) if (i, j) not in PAIRS]


@pytest.fixture(scope="module")
def halves(pool: WorkerPool, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders with the checkpoint of step 5, by layout and tied or not."""
    folders: dict[Any, Path] = {}

    def half(number: int, tied: bool) -> Path:
        if (number, tied) not in folders:
            folder = folders[number, tied] = tmp_path_factory.mktemp("half")
            run(pool, first_half(folder, LAYOUTS[number]), model_of(tied), tokenizer)
        return folders[number, tied] / "step_00000005"

    return half


def assert_equals_second_half(result: dict[str, Any], model_config: LlamaConfig) -> None:
    """What `train` returns of a run from step 5 on is what ten steps of one process compute."""
    expected = oracle_training(run_config(Path("unused"), {}), model_config, random_tokens())
    assert_close(result["losses"], expected["losses"][5:], what="losses")
    assert_close(result["grad_norms"], expected["grad_norms"][5:], what="grad norms")
    assert result["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert_close(result["weights"][name], weight, what=name)


@pytest.mark.parametrize(
    ("first", "second"),
    [*PAIRS, *[pytest.param(*pair, marks=pytest.mark.parity) for pair in PARITY]],
    ids=lambda number: layout_name(LAYOUTS[number]) or "one",
)
def test_any_layout_goes_on_from_what_any_other_wrote(
    pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path, first: int, second: int
) -> None:
    tied = (first + second) % 2 == 0
    config = run_config(tmp_path, LAYOUTS[second], checkpoint__load_path=str(halves(first, tied)))
    result = run(pool, config, model_of(tied), tokenizer)
    assert_equals_second_half(result, model_of(tied))
    if first == second:
        whole = run(pool, run_config(tmp_path / "whole", LAYOUTS[second]), model_of(tied), tokenizer)
        assert result["losses"] == whole["losses"][5:]
        assert result["grad_norms"] == whole["grad_norms"][5:]
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            ours, theirs = (tensors_of(folder / "step_00000010", kind) for folder in (tmp_path, tmp_path / "whole"))
            assert ours.keys() == theirs.keys() == result["weights"].keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


IN_A_V = {"pp_size": 2, "pp_engine": "zbv"}


@pytest.mark.parametrize(
    ("first", "second", "tied"),
    [
        (IN_A_V, {"pp_size": 2}, True),
        (IN_A_V, {}, False),
        ({"pp_size": 2, "pp_engine": "looped_bfs"}, IN_A_V | {"dp_size": 2}, True),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, dict) else str(value),
)
def test_any_schedule_goes_on_from_what_any_other_wrote(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any], tied: bool
) -> None:
    """With other layers on each rank: in a V, the first one has both ends of the model."""
    model_config = tiny_llama(num_hidden_layers=5, tie_word_embeddings=tied)
    run(pool, first_half(tmp_path / "first", first), model_config, tokenizer)
    half = str(tmp_path / "first/step_00000005")
    config = run_config(tmp_path / "second", second, checkpoint__load_path=half)
    assert_equals_second_half(run(pool, config, model_config, tokenizer), model_config)


@pytest.mark.parametrize("number", range(8), ids=lambda number: layout_name(LAYOUTS[number]) or "one")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_it_and_computes_our_logits(halves: Any, tokenizer: Path, number: int, tied: bool) -> None:
    folder, config = halves(number, tied), model_of(tied)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float64
    assert theirs.config.to_dict()["vocab_size"] == 61
    with torch.device("meta"):
        ours = Llama(config).to(torch.float64)
    materialise(ours, CPU, safetensors_folder.SafetensorsFolder(folder).read)
    ids = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(0))
    assert_close(ours(ids), with_exact_norms(theirs)(input_ids=ids, use_cache=False).logits, 1e-12, "logits")
    # And it is what the other layouts wrote.
    reference = halves(0, tied)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        tensors, expected = tensors_of(folder, kind), tensors_of(reference, kind)
        assert tensors.keys() == expected.keys() == dict(ours.named_parameters()).keys()
        for name, tensor in tensors.items():
            assert_close(tensor, expected[name], what=f"{kind} of {name}")
    text = "def f(x)"
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded(text)["input_ids"] == AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]
    assert GenerationConfig.from_pretrained(folder).eos_token_id == loaded.eos_token_id == 0
    files = {path.name for path in folder.iterdir()}
    stages = LAYOUTS[number].get("pp_size", 1)
    assert len([name for name in files if name.endswith(".safetensors")]) == 3 * stages


def test_trainer_state(halves: Any) -> None:
    data = json.loads((halves(7, True) / "trainer_state.json").read_text())
    known = {key: data[key] for key in ("step", "tokens", "samples", "seed", "layout", "wandb_run_id")}
    assert known == {
        "step": 5, "tokens": 5 * BATCH * 16, "samples": 5 * BATCH, "seed": 42, "layout": "dp 2 x pp 2 x cp 1 x tp 2", "wandb_run_id": None,
    }  # fmt: skip
    assert data["config"]["distributed"]["pp_size"] == 2
    assert data["versions"]["torch"] == torch.__version__
    assert set(data["files"]) | {"trainer_state.json"} == {path.name for path in halves(7, True).iterdir()}


def test_bfloat16_with_its_master_weights(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    """The same layout goes on bit for bit; another one begins with the same master weights to the last bit."""
    model, layout, dtype = model_of(True), LAYOUTS[7], {"model__dtype": "bfloat16"}
    whole = run(pool, run_config(tmp_path / "whole", layout, **dtype), model, tokenizer)
    run(pool, first_half(tmp_path / "run", layout, **dtype), model, tokenizer)
    half = tmp_path / "run" / "step_00000005"
    masters, weights = tensors_of(half, "master"), tensors_of(half, "model")
    assert all(masters[name].to(torch.bfloat16).equal(weight) for name, weight in weights.items())
    assert not any(master.equal(master.bfloat16().float()) for name, master in masters.items() if "proj" in name)
    assert AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16

    result = run(pool, run_config(tmp_path / "run", layout, checkpoint__load_path="latest", **dtype), model, tokenizer)
    assert result["losses"] == whole["losses"][5:]
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        ours, theirs = (tensors_of(tmp_path / name / "step_00000010", kind) for name in ("run", "whole"))
        assert all(ours[name].equal(theirs[name]) for name in theirs)

    # A learning rate of next to nothing, in another layout: what was read is written again.
    still = {"training__learning_rate": 1e-30, "training__weight_decay": 0.0, "checkpoint__load_path": str(half)}
    other = first_half(tmp_path / "other", {"pp_size": 3}, **still | dtype | {"training__total_train_steps": 6})
    other = other.model_copy(update={"training": other.training.model_copy(update={"max_tokens": None})})
    run(pool, other, model, tokenizer)
    again = tensors_of(tmp_path / "other" / "step_00000006", "master")
    assert all(again[name].equal(master) for name, master in masters.items())
    # In float32, the master weights are the weights.
    wide = other.model_copy(update={"model": other.model.model_copy(update={"dtype": "float32"})})
    run(
        pool,
        wide.model_copy(update={"checkpoint": wide.checkpoint.model_copy(update={"save_dir": str(tmp_path / "wide")})}),
        model,
        tokenizer,
    )
    again = tensors_of(tmp_path / "wide" / "step_00000006", "model")
    assert all(again[name].equal(master) for name, master in masters.items())
    assert tensors_of(tmp_path / "wide" / "step_00000006", "master") == {}


def test_a_model_folder_is_where_training_begins(
    pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path
) -> None:
    """Without a trainer's state: step 0, and the first loss is that of the folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(halves(0, False))
    model.save_pretrained(tmp_path / "model")
    config = run_config(tmp_path / "run", {"pp_size": 2}, checkpoint__load_path=str(tmp_path / "model"))
    result = run(pool, config, model_of(False), tokenizer)
    assert len(result["losses"]) == 10
    rows = torch.from_numpy(random_tokens()[: BATCH * 16 + 1].astype("int64"))
    logits = with_exact_norms(model)(input_ids=rows[:-1].view(BATCH, 16), use_cache=False).logits
    assert_close(result["losses"][0], torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[1:]).item())


def test_latest_and_keep_last(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    layout, model = {"dp_size": 2}, model_of(False)
    keys = {"checkpoint__save_frequency": 2, "checkpoint__keep_last": 2, "checkpoint__load_path": "latest"}
    (tmp_path / "step_00000004.unfinished").mkdir()  # what a killed run has left
    first = run(pool, first_half(tmp_path, layout, **keys), model, tokenizer)
    assert len(first["losses"]) == 5  # there was nothing to go on from
    assert list(checkpoint_folders(tmp_path)) == [4, 5]
    second = run(pool, run_config(tmp_path, layout, **keys), model, tokenizer)
    assert list(checkpoint_folders(tmp_path)) == [8, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000008", "step_00000010"]
    whole = run(pool, run_config(tmp_path / "whole", layout), model, tokenizer)
    assert first["losses"] + second["losses"] == whole["losses"]
    third = run(pool, run_config(tmp_path, layout, **keys), model, tokenizer)
    assert third["losses"] == []  # it was at the end


@pytest.mark.parametrize("changes", [{"training__seq_length": 8}, {"training__seed": 1, "dataset__shuffle": True}])
def test_other_data_begin_anew(
    pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = run_config(tmp_path, {}, checkpoint__load_path=str(halves(0, False)), **changes)
    assert len(run(pool, config, model_of(False), tokenizer)["losses"]) == 5
    state = json.loads((tmp_path / "step_00000010/trainer_state.json").read_text())
    assert (state["step"], state["samples"]) == (10, 5 * BATCH)
    assert state["tokens"] == 5 * BATCH * (16 + config.training.seq_length)


def test_another_global_batch_goes_on_at_the_same_sample(
    pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path
) -> None:
    config = run_config(
        tmp_path, {}, checkpoint__load_path=str(halves(0, False)), training__gradient_accumulation_steps=1
    )
    run(pool, config, model_of(False), tokenizer)
    state = json.loads((tmp_path / "step_00000010/trainer_state.json").read_text())
    assert (state["step"], state["samples"], state["tokens"]) == (10, 5 * BATCH + 5 * 4, 5 * 16 * (BATCH + 4))


# ---------------------------------------------------------------------------------- in the background, full disks


def train_while_writing(config: Config, model_config: LlamaConfig, tokenizer: Path) -> dict[str, Any]:
    """Checkpoints are only written when the step after them has changed the tensors."""
    write, step, steps = CheckpointWriter._write, AdamW.step, []

    def late(self: CheckpointWriter, progress: Progress, pieces: Any) -> None:
        while len(steps) <= progress.step < config.training.total_train_steps and progress.step % 2:
            time.sleep(0.001)
        write(self, progress, pieces)

    def counted(self: AdamW) -> None:
        step(self)
        steps.append(1)

    CheckpointWriter._write, AdamW.step = late, counted  # type: ignore[method-assign]
    try:
        return train(config, model_config, tokenizer)
    finally:
        CheckpointWriter._write, AdamW.step = write, step  # type: ignore[method-assign]


def test_asynchronous_ones_hold_the_same(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    """Copied before the next step changes the tensors; and two in a row do not get mixed up."""
    layout, model = {"dp_size": 2, "tp_size": 2}, model_of(False)
    for name, function in (("sync", train), ("async", train_while_writing)):
        keys = {"checkpoint__save_frequency": 1, "checkpoint__async_save": name == "async"}
        pool.run(function, 4, run_config(tmp_path / name, layout, **keys), model, tokenizer)
    for step in range(1, 11):
        first, second = (checkpoint_folders(tmp_path / name)[step] for name in ("sync", "async"))
        for path in first.glob("*.safetensors"):
            assert path.read_bytes() == (second / path.name).read_bytes(), path


def train_on_a_full_disk(config: Config, model_config: LlamaConfig, tokenizer: Path, after: int) -> tuple[str, int]:
    """The error of a run that cannot write more than so many bytes a file on its last rank, and the steps it took."""
    write = safetensors_folder.FileWriter.write

    class Full:
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

        def seek(self, start: int) -> None:
            pass

        def close(self) -> None:
            pass

    def limited(self: Any, start: int, data: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and start > after:
            self.file.close()
            self.file = Full()
        write(self, start, data)

    take_step, steps = AdamW.step, []

    def counted(self: AdamW) -> None:
        take_step(self)
        steps.append(1)
        time.sleep(0.3)  # for the thread, so that it is done in the next step

    safetensors_folder.FileWriter.write, AdamW.step = limited, counted  # type: ignore[method-assign]
    try:
        return mistake(config, model_config, tokenizer), len(steps)
    finally:
        safetensors_folder.FileWriter.write, AdamW.step = write, take_step  # type: ignore[method-assign]


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_one_error_on_all_ranks(
    pool: WorkerPool, tokenizer: Path, tmp_path: Path, in_background: bool
) -> None:
    """In the middle of a file, while the other ranks still gather; the earlier checkpoint stays and is used."""
    layout, model = {"pp_size": 2, "tp_size": 2}, model_of(True)
    keys = {"checkpoint__load_path": "latest", "checkpoint__async_save": in_background}
    run(pool, first_half(tmp_path, layout, **keys), model, tokenizer)
    config = run_config(tmp_path, layout, **keys | {"checkpoint__save_frequency": 6})
    results = pool.run(train_on_a_full_disk, 4, config, model, tokenizer, 10_000)
    expected = (
        f"the checkpoint {tmp_path}/step_00000006 cannot be written: No space left on device; make room there, or choose "
        f"another save_dir that all processes can write. Earlier checkpoints are as they were"
    )
    # In the background it surfaces in the next step, long before the next checkpoint is due.
    assert results == [(expected, 2 if in_background else 1)] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]
    assert len(run(pool, run_config(tmp_path, layout, **keys), model, tokenizer)["losses"]) == 5


# -------------------------------------------------------------------------------------- damaged and wrong folders


def flip(path: Path, place: int = -7) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def damage(folder: Path, how: str) -> None:
    single = "model.safetensors" if (folder / "model.safetensors").exists() else "model-00002-of-00002.safetensors"
    if how == "flipped weight":
        flip(folder / single)
    elif how == "flipped header":
        flip(folder / single, 60)
    elif how == "flipped moment":
        flip(next(iter(sorted(folder.glob("exp_avg_sq*.safetensors")))), 5000)
    elif how == "truncated":
        path = folder / single
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "longer":
        path = folder / single
        path.write_bytes(path.read_bytes() + b"\0")
    elif how == "missing":
        (folder / single).unlink()
    elif how == "config":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("32", "64"))
    elif how == "no state":
        (folder / "trainer_state.json").unlink()
    elif how == "flipped state":
        path = folder / "trainer_state.json"
        path.write_text(path.read_text().replace('"step": 5', '"step": 7'))
    elif how == "empty state":
        (folder / "trainer_state.json").write_text("")
    elif how == "foreign state":
        (folder / "trainer_state.json").write_text("[1, 2]")


DAMAGES = {
    "flipped weight": r"model.*safetensors is damaged: the checksum of bytes \d+ to \d+ is [\da-f]{16}, but [\da-f]{16} was written",
    "flipped header": r"model.*safetensors is damaged: the checksum of bytes 0 to",
    "flipped moment": r"exp_avg_sq.*safetensors is damaged: the checksum",
    "truncated": r"model.*safetensors has [\d,]+ bytes, but [\d,]+ were written; use another checkpoint",
    "longer": r"model.*safetensors has [\d,]+ bytes, but [\d,]+ were written; use another checkpoint",
    "missing": r"model.*safetensors is missing; use another checkpoint",
    "config": r"config\.json is damaged: the checksum",
    "no state": r"trainer_state\.json is missing, so training cannot go on from there; use another checkpoint",
    "flipped state": r"trainer_state\.json is damaged \(its checksum is another one\); use another checkpoint",
    "empty state": r"trainer_state\.json is damaged \(Expecting value",
    "foreign state": r"trainer_state\.json is damaged \(",
}


@pytest.mark.parametrize("number", [0, 7], ids=["one", "dp2 pp2 tp2"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_checkpoints_are_refused_by_name(
    pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path, how: str, number: int
) -> None:
    """By a layout of two ranks, which share the checking."""
    folder = Path(shutil.copytree(halves(number, True), tmp_path / "step_00000005"))
    damage(folder, how)
    config = run_config(tmp_path / "run", {"dp_size": 2}, checkpoint__load_path=str(folder))
    messages = pool.run(mistake, 2, config, model_of(True), tokenizer)
    assert messages[0] == messages[1]
    (line,) = messages[0].splitlines()
    assert line.startswith(str(folder))
    assert re.search(DAMAGES[how], line), line


def mistake(config: Config, model_config: LlamaConfig, tokenizer: Path) -> str:
    with pytest.raises(UserError) as error:
        train(config, model_config, tokenizer)
    return str(error.value)


def warnings_of(config: Config, model_config: LlamaConfig, tokenizer: Path) -> tuple[int, list[str]]:
    """Of a run: the number of its steps, and its warnings."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("picotron").addHandler(handler)
    try:
        return len(train(config, model_config, tokenizer)["losses"]), lines
    finally:
        logging.getLogger("picotron").removeHandler(handler)


def test_latest_is_the_newest_whole_one(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    keys = {"checkpoint__save_frequency": 2, "checkpoint__load_path": "latest"}
    run(pool, run_config(tmp_path, {}, **keys), model_of(False), tokenizer)
    assert list(checkpoint_folders(tmp_path)) == [2, 4, 6, 8, 10]
    damage(tmp_path / "step_00000010", "truncated")
    damage(tmp_path / "step_00000008", "flipped moment")
    config = run_config(tmp_path, {"dp_size": 2}, checkpoint__load_path="latest", checkpoint__save_frequency=0)
    for steps, lines in pool.run(warnings_of, 2, config, model_of(False), tokenizer):
        assert steps == 4
        assert len(lines) == 2
        assert lines[0].startswith(f"{tmp_path}/step_00000010/model.safetensors has ")
        assert lines[1].startswith(f"{tmp_path}/step_00000008/exp_avg_sq.safetensors is damaged")
        assert all(line.endswith(": the checkpoint before it is tried") for line in lines)
    for step in (2, 4, 6):
        damage(checkpoint_folders(tmp_path)[step], "missing")
    steps, lines = pool.run(
        warnings_of, 1, config.model_copy(update={"distributed": make_config().distributed}), model_of(False), tokenizer
    )[0]
    assert (steps, len(lines)) == (10, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 67}, "holds a model with vocab_size=61, but this run's has vocab_size=67; use the config"),
        ({"num_hidden_layers": 2}, "holds a model with num_hidden_layers=3, but this run's has num_hidden_layers=2"),
        ({"hidden_size": 64}, "holds a model with hidden_size=32, but"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=2, but"),
        ({"rope_theta": 5e5}, r"rope_parameters={'rope_theta': 10000.0, 'rope_type': 'default'}, but this run's has"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=True, but this run's has tie_word_embeddings=False"),
    ],
)
def test_other_models(
    pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    sizes = {"tie_word_embeddings": True, "num_attention_heads": 8} | changes
    config = run_config(tmp_path, {"dp_size": 2}, checkpoint__load_path=str(halves(0, True)))
    for line in pool.run(mistake, 2, config, tiny_llama(**sizes), tokenizer):
        assert line.startswith(str(halves(0, True)))
        assert message in line
        assert len(line.splitlines()) == 1


def test_folders_that_are_no_checkpoints(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "step_00000005.unfinished").mkdir()
    (tmp_path / "empty").mkdir()
    for name, message in {
        "nowhere": "is no folder; give a checkpoint, a model's folder, or 'latest'",
        "step_00000005.unfinished": "was never finished; use an earlier checkpoint, or 'latest'",
        "empty": "has no readable config.json",
    }.items():
        config = run_config(tmp_path / "run", {}, checkpoint__load_path=str(tmp_path / name))
        assert message in pool.run(mistake, 1, config, model_of(True), tokenizer)[0]


def train_where_nothing_can_be_deleted(config: Config, model_config: LlamaConfig, tokenizer: Path) -> Any:
    delete = shutil.rmtree

    def refuse(path: Path) -> None:
        raise OSError(39, "Directory not empty")  # as network file systems say of open files

    shutil.rmtree = refuse  # type: ignore[assignment]
    try:
        return warnings_of(config, model_config, tokenizer)
    finally:
        shutil.rmtree = delete


def test_what_cannot_be_deleted_does_not_stop_a_run(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "step_00000077.unfinished").mkdir()
    config = run_config(tmp_path, {}, checkpoint__save_frequency=5, checkpoint__keep_last=1)
    ((steps, lines),) = pool.run(train_where_nothing_can_be_deleted, 1, config, model_of(False), tokenizer)
    assert steps == 10
    assert f"{tmp_path}/step_00000005 cannot be deleted: Directory not empty" in lines
    assert list(checkpoint_folders(tmp_path)) == [10]


def latest_of_two_machines(first: Config, second: Config, model_config: LlamaConfig, tokenizer: Path) -> str:
    return mistake(second if dist.get_rank() else first, model_config, tokenizer)


def test_a_folder_that_not_all_machines_see(pool: WorkerPool, halves: Any, tokenizer: Path, tmp_path: Path) -> None:
    configs = [
        run_config(folder, {"dp_size": 2}, checkpoint__load_path="latest")
        for folder in (halves(0, False).parent, tmp_path)
    ]
    for message in pool.run(latest_of_two_machines, 2, *configs, model_of(False), tokenizer):
        assert "rank 1 sees 0 checkpoints in" in message
        assert message.endswith("but rank 0 sees 1; checkpoint.save_dir must be a folder that all machines share")


def test_a_tokenizer_with_a_folder_of_templates(pool: WorkerPool, tokenizer: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tokenizer, tmp_path / "tokenizer"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    run(pool, first_half(tmp_path / "run", {}), model_of(False), folder)
    written = tmp_path / "run/step_00000005/additional_chat_templates/tools.jinja"
    assert written.read_text() == "{{ messages }}"


def test_the_state_round_trips() -> None:
    state = TrainerState(
        step=3, tokens=4, samples=5, order_of_samples="a", seed=1, layout="dp 1", config={"a": {"b": 0.1}},
        versions={}, wandb_run_id="x", files={"f": [safetensors_folder.Part(0, 2, "3")]},
    )  # fmt: skip
    data = json.loads(state.to_json())
    assert len(data.pop("xxh3")) == 16
    assert TrainerState.model_validate_json(json.dumps(data)) == state
