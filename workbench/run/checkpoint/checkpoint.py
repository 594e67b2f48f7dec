"""Reader of checkpoints: Hugging Face model folders with the state that training needs to resume exactly.

    config.json  model.safetensors  tokenizer.json ...     a model that transformers can load
    exp_avg.safetensors  exp_avg_sq.safetensors            the optimizer's state under the same names, float32 or wider
    master.safetensors                                     the master weights, if the weights are in a narrower dtype
    trainer_state.json                                     progress and config of the run, checksums of all files

Tensors are stored unsharded, so any layout can resume from a checkpoint that any other wrote: each rank reads the
slices of its shards. With pipeline parallelism, each pp rank has its own file of each kind, and an index lists the
file of each tensor. `writer` writes checkpoints.
"""

import json
import logging
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron.config import Config, Model, Training
from picotron.console import UserError
from picotron.model.families import architecture
from picotron.model.llama import Llama
from picotron.model.placement import Index
from picotron.model.weights import ReadTensor, copy_part
from picotron.optimizer import AdamW, learning_rate_factor
from workbench.files import UNFINISHED, read_object
from workbench.run.all_ranks import first_unequal, run_on_all_ranks
from workbench.run.checkpoint.expert_names import with_experts
from workbench.run.checkpoint.safetensors_folder import ByteRange, SafetensorsFolder, check_range, find_folder
from workbench.run.metrics import Progress
from workbench.run.model_config import load_model_config
from workbench.run.run_folder import checkpoint_folders, parse_load_path

logger = logging.getLogger("picotron")

STATE_FILE = "trainer_state.json"
SHOWN = 5  # names of tensors in a message
PRETRAINED_RATE = 1e-4  # learning rate above which weights that are trained already are usually destroyed


def is_of_optimizer(name: str) -> bool:
    """Return whether a file of a checkpoint has tensors of the optimizer's state, or their index."""
    return ".safetensors" in name and not name.startswith("model")


FileRanges = dict[str, list[ByteRange]]  # checksums of what was written, by the name of a file


class TrainerState(BaseModel):
    """Contents of trainer_state.json, except for the checksum of these contents."""

    model_config = ConfigDict(strict=True, frozen=True, populate_by_name=True)

    step: NonNegativeInt
    tokens: NonNegativeInt
    samples: NonNegativeInt
    """position in the data"""
    data_fingerprint: str = Field(validation_alias=AliasChoices("data_fingerprint", "order_of_samples"))
    """identifies the data and their order, in which `samples` is a position; picotron 0.1 calls it order_of_samples"""
    updates: dict[str, NonNegativeInt] = {}
    """of earlier versions, in which parameters could be frozen for some of the steps: their numbers of updates"""
    loss_scale: dict[str, float] = {}
    """of training in float16, see workbench/variants/float16.py"""
    seed: NonNegativeInt
    layout: str
    config: dict[str, Any]
    versions: dict[str, str]
    wandb_run_id: str | None
    start: str | None = None
    """folder or hub id with the weights with which the run began, "" if they were random; None in earlier versions"""
    files: FileRanges
    """consecutive byte ranges of each of the other files, with their checksums"""

    @property
    def model_files(self) -> FileRanges:
        """Byte ranges of the files that belong to the model, and not to the optimizer."""
        return {name: ranges for name, ranges in self.files.items() if not is_of_optimizer(name)}

    def to_json(self) -> str:
        """Format the state as JSON with its checksum. Keys with their default values are left out, so that earlier
        versions, which do not know these keys, can read the file.
        """
        data = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps(data | {"xxh3": _checksum(data)}, indent=1) + "\n"


def _checksum(data: dict[str, Any]) -> str:
    """Checksum of a state, independent of the order of its keys."""
    return xxhash.xxh3_64_hexdigest(json.dumps(data, sort_keys=True).encode())


def read_state(folder: Path, weights_only: bool = False) -> TrainerState | None:
    """Read the trainer's state of a checkpoint. Returns None for a model folder without one.

    Raises:
        UserError: there is no such folder, it is an incomplete checkpoint, or its state is damaged.
    """
    path = folder / STATE_FILE
    if not os.path.isdir(folder):  # False without permission, unlike `Path.is_dir`
        raise UserError(f"{folder} is not a folder; use a checkpoint or a model folder")
    if folder.name.endswith(UNFINISHED):
        raise UserError(f"{folder} is an incomplete checkpoint; use an earlier one")
    try:
        exists = path.exists()
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}; use another checkpoint") from None
    if not exists:
        if checkpoints := checkpoint_folders(folder):
            newest = checkpoints[max(checkpoints)]
            raise UserError(f"{folder} is a run folder; use one of its checkpoints, of which {newest} is the newest")
        if (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder} is a run folder without checkpoints; use a checkpoint or a model folder")
        if not weights_only and any(is_of_optimizer(each.name) for each in folder.iterdir()):
            raise UserError(f"{path} is missing, so training cannot resume from this folder; use another checkpoint")
        return None
    try:
        data = read_object(path)
        if data.pop("xxh3") != _checksum(data):
            raise ValueError("checksum mismatch")
        return TrainerState.model_validate_json(json.dumps(data))
    except UserError as error:
        raise UserError(f"{error}; use another checkpoint") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}); use another checkpoint") from None


def check_files(folder: Path, files: FileRanges, share: int = 0, shares: int = 1) -> None:
    """Check the sizes of all files of a folder, and the checksums of one share of their byte ranges.

    Args:
        files: expected byte ranges of each file, by name.
        share, shares: index of the share, and number of shares that together cover all byte ranges.

    Raises:
        UserError: a file is missing, or its size or contents differ from what was written.
    """
    for name, ranges in files.items():
        path, size = folder / name, sum(each.size for each in ranges)
        if not path.exists():
            raise UserError(f"{path} is missing; use another checkpoint")
        if path.stat().st_size != size:
            raise UserError(
                f"{path} has {path.stat().st_size:,} bytes, but {size:,} were written; use another checkpoint"
            )
    all_ranges = [(folder / name, each) for name, ranges in files.items() for each in ranges]
    for path, expected in all_ranges[share::shares]:
        check_range(path, expected)


def check_tensors(model: SafetensorsFolder) -> dict[str, str]:
    """Compare the tensors of a model folder, which any program may have written, with its config, and log which of them
    are ignored. Every rank must call this.

    Returns:
        The names of tensors that the folder has under another name: it may have a tied matrix as that of the head.

    Raises:
        UserError: on every rank, if the head has a matrix of its own, although the config ties it to the embedding's.
    """
    config, head, embedding = (
        load_model_config(Model(name=str(model.folder))),
        "lm_head.weight",
        "model.embed_tokens.weight",
    )
    with torch.device("meta"):
        ignored = model.file_of.keys() - with_experts((name for name, _ in Llama(config).named_parameters()), config)

    def differ() -> bool:
        """Compare this rank's share of the rows of the two matrices."""
        bounds = (config.vocab_size * rank // dist.get_world_size() for rank in (dist.get_rank(), dist.get_rank() + 1))
        index, shape = (slice(*bounds),), torch.Size([config.vocab_size, config.hidden_size])
        return bool((model.read(head, shape, index) != model.read(embedding, shape, index)).any())

    names = {}
    if config.tie_word_embeddings and head in ignored:
        if embedding not in model.file_of:
            names = {embedding: head}
        elif any(run_on_all_ranks(differ)):
            raise UserError(
                f"{model.folder} has its own {head}, which differs from {embedding}, but tie_word_embeddings is true in its "
                f"config.json, or by default; set it to false there to use both, or remove {head}"
            )
        ignored -= {head}
    ignored = {name for name in ignored if not name.endswith(".inv_freq")}  # buffers of old models
    if ignored and dist.get_rank() == 0:
        first = ", ".join(sorted(ignored)[:SHOWN])
        logger.warning("%s has %d tensors that the model ignores: %s", model.folder, len(ignored), first)
    return names


class Checkpoint:
    """A checkpoint whose files have been checked, or a model folder without a trainer's state (`state` is None).

    Every rank must create one, because the ranks divide the check among themselves.

    Args:
        weights_only: whether to use the trainer's state only to check the files of the model.
    """

    def __init__(self, folder: Path, weights_only: bool = False) -> None:
        def check() -> TrainerState | None:
            state = read_state(folder, weights_only)
            if state is not None:
                files = state.model_files if weights_only else state.files
                check_files(folder, files, dist.get_rank(), dist.get_world_size())
            return state

        states = run_on_all_ranks(check)
        if rank := first_unequal(states):
            raise UserError(
                f"{folder} is another checkpoint for rank {rank} than for rank 0; use a folder that all machines share"
            )
        self.folder, self.state = folder, None if weights_only else states[0]

    @property
    def kinds(self) -> set[str]:
        """Kinds of the tensors of the optimizer's state, of which none exist before a step."""
        return {re.split("[-.]", name)[0] for name in (self.state.files if self.state else ()) if is_of_optimizer(name)}

    def state_in(self, save_dir: str) -> TrainerState | None:
        """Return the trainer's state if the checkpoint is in `save_dir`, so that the run continues in it, else None."""
        # The checkpoint may be a link in `save_dir`, or its folder may be behind a link.
        places = self.folder.parent.resolve(), self.folder.resolve().parent
        return self.state if Path(save_dir).resolve() in places else None

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer with which the model was trained; None if it has none."""
        return self.folder if (self.folder / "tokenizer.json").exists() else None

    def weights(self) -> ReadTensor:
        """Return a reader of the weights, for `materialise`. The weights of the model are the master weights, rounded,
        so it reads these, except for frozen parameters, which have none, and for weights that a program has changed
        since its last step.

        Raises:
            UserError: on every rank, if the weights of a model folder, which has no checksums, differ between ranks, or
                see `check_tensors`.
        """
        model, names = SafetensorsFolder(self.folder), dict[str, str]()
        if self.state is None:
            names = check_tensors(model)
            if rank := first_unequal(run_on_all_ranks(model.fingerprint)):
                raise UserError(
                    f"{self.folder} has other weights for rank {rank} than for rank 0; copy the same files to all machines"
                )
        masters = SafetensorsFolder(self.folder, "master") if "master" in self.kinds else None

        def read(name: str, shape: torch.Size, index: Index) -> Tensor:
            weight = model.read(names.get(name, name), shape, index)
            if masters is None or name not in masters.file_of:
                return weight
            master = masters.read(name, shape, index)
            return torch.where(weight == master.to(weight.dtype), master, weight)

        return read

    def progress(self, fingerprint: str, training: Training) -> Progress:
        """Return the progress to resume from, at the start of the data if their fingerprint has changed."""
        if self.state is None:
            if training.learning_rate > PRETRAINED_RATE:
                logger.warning(
                    "training.learning_rate=%g is high for weights that are trained already; docs/finetune.json has 2e-5",
                    training.learning_rate,
                )
            return Progress()
        warn_of_jump(self.state, training)
        if fingerprint != self.state.data_fingerprint:
            logger.warning(
                "%s was trained on different data, or in a different order (data set, tokenizer, seq_length, seed, or "
                "eval_steps times the global batch); this run starts at the beginning of its data, and its evaluations may "
                "read what was trained on",
                self.folder,
            )
        samples = self.state.samples if fingerprint == self.state.data_fingerprint else 0
        return Progress(self.state.step, self.state.tokens, samples)

    def restore(self, optimizer: AdamW, llama: Llama) -> None:
        """Load the optimizer's state, if the checkpoint has one.

        Raises:
            UserError: the checkpoint's run had another optimizer than this one, or has frozen other parameters.
        """
        if self.state is None or not self.kinds:
            return
        names = {parameter: name for name, parameter in llama.named_parameters()}
        if self.kinds - {"master"} != {*optimizer.moments}:
            raise UserError(
                f"{self.folder} has {', '.join(sorted(self.kinds))} of an optimizer, but {type(optimizer).__name__} needs "
                f"{', '.join(optimizer.moments)}; use the optimizer of the run that wrote it, or export the weights, and "
                f"start a new run from them"
            )
        moments = {kind: SafetensorsFolder(self.folder, kind) for kind in optimizer.moments}
        readers: dict[str, ReadTensor] = {kind: folder.read for kind, folder in moments.items()}
        readers["master"] = self.weights()

        def read(parameter: nn.Parameter, kind: str, tensor: Tensor) -> None:
            copy_part(tensor, parameter, names[parameter], readers[kind])

        for parameter, name in names.items():
            if (name in moments[optimizer.moments[0]].file_of) != (
                parameter in optimizer.masters
            ) or name in self.state.updates:
                raise UserError(
                    f"{name} was frozen in {self.folder} or is now, and not for the whole run; freeze the same parameters, or "
                    f"export the weights, and start a new run from them"
                )
        # A run in another dtype passes the loss scale on, with the number of skipped steps.
        vars(vars(optimizer).setdefault("loss_scale", SimpleNamespace())).update(self.state.loss_scale)
        optimizer.restore(self.state.step - int(self.state.loss_scale.get("skipped", 0)), read)


def check_same_model(
    folder: Path,
    model_config: PreTrainedConfig,
    remedy: str = "use the config of the run that wrote it, or another load_path",
) -> None:
    """Raise a UserError if the weights in a folder belong to a different architecture than the run's model."""
    both = (load_model_config(Model(name=str(folder))), model_config)
    saved_model, own_model = (architecture(each) | {"num_hidden_layers": each.num_hidden_layers} for each in both)
    for key, saved in saved_model.items():
        if saved != (expected := own_model[key]):
            raise UserError(
                f"{folder} holds a model with {key}={saved!r}, but this run's model has {key}={expected!r}; {remedy}"
            )


def find_checkpoint(config: Config, model_config: PreTrainedConfig) -> Checkpoint | None:
    """Open the checkpoint or model folder that `checkpoint.load_path`, or else `model.pretrained`, selects.

    Every rank must call this. Returns None if training starts from initial weights.

    Raises:
        UserError: the checkpoint is damaged, or of a different architecture.
    """
    latest, start = parse_load_path(config)
    checkpoint = _newest_checkpoint(Path(config.checkpoint.save_dir)) if latest else None
    if checkpoint is None and start:
        checkpoint = Checkpoint(Path(start))
    if checkpoint is not None:
        check_same_model(checkpoint.folder, model_config)
        logger.info(
            "training %s %s", "resumes from" if checkpoint.state else "starts from the weights of", checkpoint.folder
        )
    elif config.model.pretrained:
        checkpoint = Checkpoint(find_folder(config.model.name), weights_only=True)
        check_same_model(checkpoint.folder, model_config, "remove that key from the config, or model.pretrained")
    return checkpoint


def warn_of_jump(state: TrainerState, training: Training) -> None:
    """Log a warning if the learning rate of the next step is not that of the checkpoint's config."""
    saved: Any = state.config.get("training")
    try:
        before = Training.model_validate({key: saved[key] for key in saved.keys() & Training.model_fields.keys()})
        old, new = (each.learning_rate * learning_rate_factor(each)(state.step) for each in (before, training))
    except (ValidationError, AttributeError, ArithmeticError):  # of a version with other limits, or another program
        return
    if not math.isclose(old, new, rel_tol=1e-3):
        logger.warning(
            "the learning rate of step %d is %.3g, but %.3g in the checkpoint's run, whose config differs; lr_scheduler='wsd' "
            "has no such jump if total_train_steps changes before its decay", state.step + 1, new, old,
        )  # fmt: skip


def _newest_checkpoint(save_dir: Path) -> Checkpoint | None:
    """Open the newest intact checkpoint, and log a warning for each damaged one. Returns None if there is none at all.

    Raises:
        UserError: no checkpoint is intact, or some ranks see other checkpoints than rank 0.
    """
    seen = run_on_all_ranks(lambda: list(checkpoint_folders(save_dir).values()))
    folders = seen[0]
    if rank := first_unequal(seen):
        raise UserError(
            f"rank {rank} sees {len(seen[rank])} checkpoints in {save_dir}, but rank 0 sees {len(folders)}; "
            f"checkpoint.save_dir must be a folder that all machines share"
        )
    for folder in reversed(folders):
        try:
            checkpoint = Checkpoint(folder)
            if checkpoint.state is not None:
                return checkpoint
            problem = f"{folder / STATE_FILE} is missing"
        except UserError as error:
            problem = str(error).split(";")[0]
        logger.warning("%s; trying the checkpoint before it", problem)
    if folders:
        raise UserError(
            f"checkpoint.load_path='latest': none of the {len(folders)} checkpoints in {save_dir} is intact; choose "
            f"another load_path, or another save_dir to start at step 1"
        )
    logger.info("%s has no checkpoint yet", save_dir)
    return None
