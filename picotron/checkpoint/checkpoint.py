"""Checkpoints, read: a Hugging Face model folder, and beside the model what training needs to go on exactly.

    config.json  model.safetensors  tokenizer.json ...     a model that transformers loads as it is
    exp_avg.safetensors  exp_avg_sq.safetensors            the optimizer's state under the same names, float32 or wider
    master.safetensors                                     the master weights, if the model's own are narrower
    trainer_state.json                                     how far the run was, its config, checksums of all files

All tensors are whole, so it does not matter which layout wrote them: each rank reads its slices. With pp stages there
is a file per stage and an index. `checkpoint_writer` writes all this.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, NonNegativeInt
from torch import Tensor, nn
from transformers import LlamaConfig

from picotron.checkpoint.safetensors_folder import ByteRange, SafetensorsFolder, check_range, find_folder
from picotron.collectives import run_on_all_ranks
from picotron.config import Config, Model
from picotron.data import Progress
from picotron.errors import UserError
from picotron.model import Llama, load_model_config
from picotron.optimizer import AdamW
from picotron.run_folder import UNFINISHED, checkpoint_folders
from picotron.weights import ReadTensor, copy_shard, parameters_and_shards

logger = logging.getLogger("picotron")

STATE_FILE = "trainer_state.json"
ARCHITECTURE_KEYS = (  # what a model computes from its weights
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "rms_norm_eps", "rope_parameters",
)  # fmt: skip


class TrainerState(BaseModel):
    """The contents of trainer_state.json, where a checksum of them is added."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)

    step: NonNegativeInt
    tokens: NonNegativeInt
    samples: NonNegativeInt
    """the position in the data"""
    data_fingerprint: str = Field(validation_alias=AliasChoices("data_fingerprint", "order_of_samples"))
    """of the data in which that is the position; called order_of_samples by picotron 0.1"""
    seed: NonNegativeInt
    layout: str
    config: dict[str, Any]
    versions: dict[str, str]
    wandb_run_id: str | None
    files: dict[str, list[ByteRange]]
    """the parts of each of the other files, one after the other"""

    @property
    def model_files(self) -> dict[str, list[ByteRange]]:
        """What is of use without an optimizer."""
        return {name: ranges for name, ranges in self.files.items() if not name.startswith(("exp_avg", "master"))}

    def to_json(self) -> str:
        """A line for each key."""
        data = self.model_dump(mode="json")
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in (data | {"xxh3": _checksum(data)}).items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _checksum(data: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(data, sort_keys=True).encode())


def read_state(folder: Path) -> TrainerState | None:
    """The state in a checkpoint; None if the folder is a model's without one.

    Raises:
        UserError: it is no folder, no whole checkpoint, or its state is damaged.
    """
    path = folder / STATE_FILE
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give a checkpoint, a model's folder, or 'latest'")
    if folder.name.endswith(UNFINISHED):
        raise UserError(f"{folder} was never finished; use an earlier checkpoint, or 'latest'")
    if not path.exists():
        if list(folder.glob("exp_avg*")):
            raise UserError(f"{path} is missing, so training cannot go on from there; use another checkpoint")
        return None
    try:
        data = json.loads(path.read_text())
        if data.pop("xxh3") != _checksum(data):
            raise ValueError("its checksum is another one")
        return TrainerState.model_validate_json(json.dumps(data))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; use another checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}); use another checkpoint") from None


def check_files(folder: Path, files: dict[str, list[ByteRange]], share: int = 0, shares: int = 1) -> None:
    """Compare files with their sizes and checksums; of `shares` that together check all of them, one share.

    Raises:
        UserError: one is missing, has another size, or another content than was written.
    """
    for name, ranges in files.items():
        path, size = folder / name, sum(each.size for each in ranges)
        if not path.exists():
            raise UserError(f"{path} is missing; use another checkpoint")
        if path.stat().st_size != size:
            raise UserError(
                f"{path} has {path.stat().st_size:,} bytes, but {size:,} were written; use another checkpoint"
            )
    everything = [(folder / name, each) for name, ranges in files.items() for each in ranges]
    for path, expected in everything[share::shares]:
        check_range(path, expected)


class Checkpoint:
    """A checkpoint, all of whose files are whole; or just a model's folder (`state` is None).

    Every rank has to make one: they share the checking.

    Args:
        weights_only: a trainer's state is only used to check the model's files.

    Raises:
        UserError: as `read_state` and `check_files`, on every rank.
    """

    def __init__(self, folder: Path, weights_only: bool = False) -> None:
        def check() -> TrainerState | None:
            state = read_state(folder)
            if state is not None:
                files = state.model_files if weights_only else state.files
                check_files(folder, files, dist.get_rank(), dist.get_world_size())
            return None if weights_only else state

        self.folder, self.state = folder, run_on_all_ranks(check)[0]
        # The master weights are the more exact ones; a model's own are their rounding.
        has_masters = self.state is not None and any(name.startswith("master") for name in self.state.files)
        self.weights_kind = "master" if has_masters else "model"

    def state_in(self, save_dir: str) -> TrainerState | None:
        """The trainer's state if the checkpoint lies in save_dir, whose records the run then continues; else None."""
        return self.state if self.folder.resolve().parent == Path(save_dir).resolve() else None

    def weights(self) -> ReadTensor:
        """For `materialise`."""
        return SafetensorsFolder(self.folder, self.weights_kind).read

    def progress(self, fingerprint: str) -> Progress:
        """Where to go on in data with this order of samples: at the beginning, if it is another one."""
        if self.state is None:
            return Progress()
        if fingerprint != self.state.data_fingerprint:
            logger.warning(
                "%s was trained on other data, or in another order (data set, tokenizer, seq_length, seed, evaluation): "
                "the data begin anew",
                self.folder,
            )
        samples = self.state.samples if fingerprint == self.state.data_fingerprint else 0
        return Progress(self.state.step, self.state.tokens, samples)

    def restore(self, optimizer: AdamW, llama: Llama) -> None:
        """Fill in the optimizer's state, if there is any here."""
        if self.state is None:
            return
        known = {parameter: (name, shard) for name, parameter, shard in parameters_and_shards(llama)}
        values: dict[str, ReadTensor] = {
            kind: SafetensorsFolder(self.folder, kind).read for kind in ("exp_avg", "exp_avg_sq")
        }
        values["master"] = self.weights()

        def read(parameter: nn.Parameter, kind: str, tensor: Tensor) -> None:
            copy_shard(tensor, *known[parameter], values[kind])

        optimizer.restore(self.state.step, read)


def check_same_model(folder: Path, model_config: LlamaConfig) -> None:
    """Raises UserError if the folder's weights are those of another model than the run's."""
    theirs = load_model_config(Model(name=str(folder)))
    for key in ARCHITECTURE_KEYS:
        there, here = getattr(theirs, key), getattr(model_config, key)
        if there != here:
            raise UserError(
                f"{folder} holds a model with {key}={there!r}, but this run's has {key}={here!r}; use the config of the "
                f"run that wrote it, or another load_path"
            )


def find_checkpoint(config: Config, model_config: LlamaConfig) -> Checkpoint | None:
    """Where `checkpoint.load_path`, or else `model.pretrained`, says that training begins; None: with initial weights.
    Every rank has to call this.

    Raises:
        UserError: the checkpoint is not whole, or of another model.
    """
    load_path, save_dir = config.checkpoint.load_path, Path(config.checkpoint.save_dir)
    checkpoint = _newest_checkpoint(save_dir) if load_path == "latest" else None
    if load_path not in ("", "latest"):
        checkpoint = Checkpoint(Path(load_path))
    if checkpoint is not None:
        check_same_model(checkpoint.folder, model_config)
        logger.info("training goes on from %s", checkpoint.folder)
    elif config.model.pretrained:
        checkpoint = Checkpoint(find_folder(config.model.name), weights_only=True)
    return checkpoint


def _newest_checkpoint(save_dir: Path) -> Checkpoint | None:
    """The newest whole one, if there is one; damaged ones are named. Raises UserError if not all ranks see them."""
    seen = run_on_all_ranks(lambda: list(checkpoint_folders(save_dir).values()))
    for rank, folders in enumerate(seen):
        if folders != seen[0]:
            raise UserError(
                f"rank {rank} sees {len(folders)} checkpoints in {save_dir}, but rank 0 sees {len(seen[0])}; checkpoint.save_dir "
                f"must be a folder that all machines share"
            )
    for folder in reversed(seen[0]):
        try:
            return Checkpoint(folder)
        except UserError as error:
            logger.warning("%s: the checkpoint before it is tried", str(error).split(";")[0])
    logger.info("%s has no whole checkpoint: training begins anew", save_dir)
    return None
