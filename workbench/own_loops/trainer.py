"""Set-up of a training loop of your own: process groups, model, optimizer and checkpoints, as train.py has them.

    with set_up(config) as trainer:
        for _ in trainer.steps():
            trainer.log(trainer.train(trainer.next_batches(), loss_fn))

A program with a loss or with batches of its own (see `batches`) needs no more, and has train.py's options.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.config import Config, Model
from picotron.console import UserError
from picotron.data.loader import MicroBatchDataLoader, Rows, epoch_order
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.weights import initial_weights
from picotron.optimizer import clip_grad_norm, make_scheduler, squared_norm
from picotron.parallelize import unwrap
from workbench.console import print_line
from workbench.own_loops.batches import Loss, cross_entropy, forward_batch, split_batch, train_batch, whole_step
from workbench.own_loops.check_batches import Batch
from workbench.pipelines.engine import check_model, check_run, make_evaluation, make_train_step
from workbench.prepare.tokens import prepare
from workbench.run.all_ranks import first_unequal, run_on_all_ranks
from workbench.run.checkpoint.checkpoint import Checkpoint, find_checkpoint
from workbench.run.checkpoint.safetensors_folder import find_folder
from workbench.run.checkpoint.writer import CheckpointWriter
from workbench.run.config_reader import leaf_keys
from workbench.run.launch import (
    StopSignals,
    check_same_config,
    connect,
    exit_after_signal,
    exit_on_error,
    forget_groups,
    is_launched,
    set_up_logging,
)
from workbench.run.metrics import Progress, check_finite, max_over_ranks
from workbench.run.ranks import run_ranks
from workbench.run.rows import data_fingerprint
from workbench.run.run_folder import CLAIM, Record, begin_run, claim_save_dir, write_record
from workbench.run.token_files import load_data
from workbench.variants.choose import build_model, build_stage, make_optimizer, split_train_eval

KEYS_OF_TRAIN = """
    training.num_samples training.eval_frequency training.eval_steps dataset.mixture dataset.eval_name
    dataset.eval_split dataset.subset_name dataset.split dataset.num_proc dataset.text_column dataset.prompt_column
    dataset.completion_column dataset.messages_column dataset.assistant_turns dataset.add_start_token dataset.skip_invalid dataset.long_samples
    dataset.mask_documents logging.use_wandb logging.project_name logging.run_name logging.sample_prompt
    logging.trace_steps checkpoint.keep_best
"""  # keys of the config that have an effect in train.py, but not in every program
DATA_SET_KEYS = "dataset training.num_samples"  # in a program that trains on the config's data set, see `read_data`
RECORD_KEYS = "dataset.split dataset.subset_name dataset.mixture training.num_samples"  # in one with `load_documents`


class Data(NamedTuple):
    """Data of a training, as its checkpoints describe them.

    Args:
        fingerprint: text that changes with the data and their order. A run whose fingerprint differs from that of its
            checkpoint starts at the beginning of its data.
        tokenizer: folder with the tokenizer's files, which checkpoints contain, see `tokenizer_folder`.
        rows: rows for `Trainer.next_batches`; None if the program makes batches of its own.
    """

    fingerprint: str = ""
    tokenizer: Path | None = None
    rows: Rows | None = None


def fingerprint(config: Config, samples: Sequence[Any]) -> str:
    """Return a hash of a program's own samples and of their order, see `Trainer.next_samples`."""
    order = config.training.seed if config.dataset.shuffle else "in order"
    digest = hashlib.sha256(repr(order).encode())
    for sample in samples:
        digest.update(repr(_as_lists(sample)).encode())
    return digest.hexdigest()[:24]


def _as_lists(sample: Any) -> Any:
    """Return a sample with lists instead of tensors and arrays, whose repr leaves out most of their numbers, also
    within a tokenizer's `BatchEncoding` or a named tuple.
    """
    if isinstance(sample, Tensor | np.ndarray):
        return sample.tolist()
    if isinstance(sample, Mapping):
        return {key: _as_lists(value) for key, value in sample.items()}
    kind = next((each for each in (list, tuple) if isinstance(sample, each)), None)
    return kind(map(_as_lists, sample)) if kind else sample


def read_data(config: Config, model_config: PreTrainedConfig, trained: Path | None) -> Data:
    """Read the data set of the config. All its rows are for training, if the config asks for no evaluations.

    Args:
        trained: see `prepare`.
    """
    tokens, _, tokenizer = load_data(config, model_config, trained, prepare)
    rows, _ = split_train_eval(tokens, config)
    return Data(data_fingerprint(rows, config), tokenizer, rows)


def run_program(read_config: Callable[[list[str]], tuple[Any, ...]], train: Callable[..., None]) -> None:
    """Run a program: read the config and whatever else from its command line, and call `train` with all of it on each
    rank.
    """

    def main() -> None:
        set_up_logging()
        config, *others = read_config(sys.argv[1:])
        run_ranks(config.distributed.world_size, functools.partial(train, config, *others))

    exit_on_error(main)


@contextlib.contextmanager
def set_up(
    config: Config, data: Data | None = None, frozen: Callable[[str], bool] = lambda name: False
) -> Iterator["Trainer"]:
    """Connect the ranks that `run_ranks` or torchrun has started, and build this rank's `Trainer`. At the end of the
    `with` block, wait for checkpoints, disconnect, and let other runs write to the folder; after a stop signal, also
    exit. Then the wrapper `trainer.model` is closed; `unwrap(trainer.model)` is the trained module. (ZeRO-3 has freed
    its weights.)

    Args:
        data, frozen: see `Trainer`.

    Raises:
        UserError: the config does not fit the model or the number of processes, `checkpoint.save_dir` is in use, or
            there is no `data`, and a key has no effect; or this process is in a run already.
    """
    if dist.is_initialized():
        raise UserError(
            "this process is in a run already: end its `with set_up` first; after an error on several ranks, start a new process"
        )
    forget_groups()  # of earlier runs, whose models the garbage collector may not have freed yet
    model_config, plan = check_run(config)
    if data is None:
        check_used(config, DATA_SET_KEYS)
    if config.model.dtype == "float16":
        raise UserError(
            "model.dtype='float16' needs a loss scale, which only train.py has; use 'bfloat16' or 'float32'"
        )
    claim_save_dir(config)
    trainer = None
    try:
        trainer = Trainer(config, connect(config, model_config, plan.identity), data, frozen)
        with trainer.writer:
            yield trainer
        dist.barrier()  # the other ranks are stopped when one of them exits with an error code
        dist.destroy_process_group()
    finally:
        CLAIM.close()
        if trainer and not (trainer.stop and is_launched()):  # the program may go on
            trainer.signals.close()
            trainer.model.unhook()  # whose hooks would keep it in memory
        if dist.is_initialized() and dist.get_world_size() == 1:  # after an error, as in a cell that runs again
            dist.destroy_process_group()
    if trainer.stop:
        exit_after_signal(trainer.stop)


def used_keys(also: str = "") -> list[str]:
    """Return the keys of the config that have an effect in a program with its own `Data`, and the keys and sections in
    `also`.
    """
    unused, also_used = KEYS_OF_TRAIN.split(), also.split()
    return [key for key in leaf_keys() if key not in unused or {key, key.partition(".")[0]} & {*also_used}]


def check_used(config: Config, also: str) -> None:
    """Raise a UserError for each key that differs from its default, but has no effect in a program with its own `Data`.

    Args:
        also: further keys that the program uses.
    """
    used = used_keys(also)
    problems = [
        f"{section}.{key}={value!r} has no effect in this program; remove it"
        for section, body in config
        for key, value in body
        if value != type(body).model_fields[key].default and f"{section}.{key}" not in used
    ]
    if problems:
        raise UserError(*problems)


def gradient_norms(model: DataParallel) -> dict[str, float]:
    """Compute the norm of the gradient of each trained parameter of the unsharded model, by its name. Every rank must
    call this, and gets all norms.
    """
    model.finish_grad_sync()

    def shares() -> dict[str, float]:
        return {
            name: squared_norm([each]).item() for name, each in unwrap(model).named_parameters() if each.requires_grad
        }

    squares: dict[str, float] = defaultdict(float)
    for found in run_on_all_ranks(shares):
        for name, share in found.items():
            squares[name] += share
    return {name: math.sqrt(square) for name, square in squares.items()}


class Trainer:
    """This rank's part of a training. The process groups must exist, see `set_up`.

    Args:
        config: config of the run.
        device: see `set_up_device`.
        data: data of the run; by default, the data set of the config.
        frozen: function of a parameter's name, which returns whether training leaves the parameter as it is.

    Attributes:
        model_config: config of the model.
        stage: this rank's part of the model, which `generate` takes.
        model: the same in its data-parallel wrapper.
        optimizer: its optimizer.
        progress: position of the run; at first, that of its checkpoint.
        writer: writer of checkpoints.
        stop: number of the signal that stops the run, or 0.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        data: Data | None = None,
        frozen: Callable[[str], bool] = lambda name: False,
    ) -> None:
        training, dtype = config.training, getattr(torch, config.model.dtype)
        self.config, self.device = config, device
        self.model_config, plan = check_model(config)

        checkpoint = find_checkpoint(config, self.model_config)
        data = data or read_data(config, self.model_config, checkpoint.tokenizer if checkpoint else None)
        if rank := first_unequal(run_on_all_ranks(lambda: data.fingerprint)):
            raise UserError(f"rank {rank} has other data than rank 0; copy the same files to all machines")
        self.progress = checkpoint.progress(data.fingerprint, training) if checkpoint else Progress()
        self.loader = MicroBatchDataLoader(data.rows, config, device, self.progress.samples) if data.rows else None
        self.position: int | None = None  # in the data, after what `next_batches` has read

        weights = checkpoint.weights() if checkpoint else initial_weights(self.model_config, training.seed)
        self.model = build_model(config, self.model_config, plan.wrap, device, dtype, weights, frozen)
        self.stage: Any = self.model.module
        self.optimizer = make_optimizer(self.model, config)
        if checkpoint:
            checkpoint.restore(self.optimizer, unwrap(self.model))
        self.scheduler = make_scheduler(self.optimizer, training, self.progress.step)
        self.step = make_train_step(config, plan, device, dtype)
        self.evaluate = make_evaluation(config, plan, device)

        resumed = checkpoint.state_in(config.checkpoint.save_dir) if checkpoint else None
        dist.barrier()  # no rank still reads the files of an earlier run
        if dist.get_rank() == 0:
            begin_run(config, resumed.step if resumed else None)
        self.writer = CheckpointWriter(
            config, self.model_config, unwrap(self.model), self.optimizer, data.tokenizer, data.fingerprint
        )
        self.signals, self.stop = StopSignals(), 0

    def steps(self) -> Iterator[int]:
        """Yield the number of completed steps until the run ends. After each pass of the loop, which takes one step or
        several, write a checkpoint if it is due. A stop signal ends the loop after the current pass, with a checkpoint.
        """
        saved = self.progress.step
        while not self.stop and not self.progress.is_end(self.config):
            before = self.progress.step
            yield before
            self.stop = int(max_over_ranks(self.device, self.signals.received).item())
            self.writer.check()
            if self.progress.step > saved and (self.writer.is_due(self.progress, before) or self.stop):
                self.writer.save(self.progress)
                saved = self.progress.step

    def next_batches(self) -> list[Batch]:
        """Read this rank's micro-batches of the next step from the config's data set. A run that resumes goes on
        after the last ones that were read before its last `train`, however many reads a step has used.

        Raises:
            UserError: `set_up` was called with data of the program's own.
        """
        if self.loader is None:
            raise UserError("the run has data of its own; call set_up without them, or pass batches to `split`")
        start = self.progress.samples if self.position is None else self.position
        self.position = start + self.loader.global_batch_size
        return [next(self.loader) for _ in range(self.loader.grad_acc_steps)]

    def next_samples(self, size: int, rows: int = 1, steps: int = 1) -> list[int]:
        """Return the numbers of the next step's samples, for data of the program's own: each occurs once in an epoch,
        in train.py's order.

        Args:
            size: number of samples.
            rows: number of rows that a sample has in a batch.
            steps: number of steps that are taken with the same batch.

        Raises:
            UserError: `rows` does not divide the global batch.
        """
        seed = self.config.training.seed if self.config.dataset.shuffle else None
        samples, orders = [], dict[int, Sequence[int]]()
        if (size_of_batch := self.config.global_batch_size) % rows:
            raise UserError(f"a batch of {size_of_batch} rows cannot have samples of {rows} rows; make it a multiple")
        count, first = size_of_batch // rows, self.progress.samples // rows
        self.position = None  # a step moves on by a global batch
        if steps > 1:  # a run can end between the steps of a batch, which it then begins again
            first = first // (count * steps) * count
        for epoch, place in (divmod(number, size) for number in range(first, first + count)):
            if epoch not in orders:
                orders[epoch] = range(size) if seed is None else epoch_order(size, seed, epoch).tolist()
            samples.append(orders[epoch][place])
        return samples

    def split(self, batch: Batch) -> list[Batch]:
        """Cut a global batch, which every rank has, into this rank's micro-batches on its device, see `split_batch`."""
        micro_batches, sharding = self.config.training.gradient_accumulation_steps, self.config.distributed.cp_sharding
        return [
            {
                name: value.to(self.device) if isinstance(value, Tensor) and name != "cu_seqlens" else value
                for name, value in each.items()
            }
            for each in split_batch(batch, micro_batches, sharding)
        ]

    def train(
        self,
        batches: Sequence[Batch],
        loss_fn: Callable[[Any, Tensor, Batch], Loss] = cross_entropy,
        on_gradients: Callable[[DataParallel], dict[str, float]] = lambda model: {},
    ) -> dict[str, float]:
        """Take an optimizer step with this rank's micro-batches, see `train_batch`.

        Args:
            on_gradients: function that every rank calls with the model when its gradients are there and not yet
                clipped, for example `gradient_norms`. It returns statistics, the same on every rank.

        Returns:
            The record of the step, the same on every rank: its number, loss, gradient norm and learning rate, the
            statistics that `loss_fn` and `on_gradients` return, and the largest load of an expert, if there are some.

        Raises:
            UserError: on every rank, if the loss or the gradient norm is NaN or infinite, or if a statistic has the
                name of another number of the record. The weights are then those of before the step.
        """
        losses: list[Tensor] = []
        with whole_step(self.model):
            result = train_batch(self.step, self.model, batches, loss_fn, losses)
            statistics = result.statistics | on_gradients(self.model)
            if taken := {"step", "loss", "grad_norm", "learning_rate", "expert_load"} & statistics.keys():
                raise UserError(f"there is a statistic {min(taken)!r}, which every record has already; rename it")
            rate = float(self.scheduler.get_last_lr()[0])
            grad_norm = clip_grad_norm(self.model, self.config.training.max_grad_norm).item()
            record = {
                "step": self.progress.step + 1,
                "loss": result.loss,
                "grad_norm": grad_norm,
                "learning_rate": rate,
            }
            check_finite(record, lambda: float(sum(losses)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.progress = self.progress.after_step(self.config)
        if self.position is not None:
            self.progress = dataclasses.replace(self.progress, samples=self.position)
        return record | statistics | getattr(unwrap(self.model), "after_step", dict)()  # balances experts

    def log(self, record: Record) -> None:
        """Append a record of numbers, or None, to metrics.jsonl, and print the numbers if it is due."""
        if pgm.process_group_manager.global_rank > 0:
            return
        write_record(Path(self.config.checkpoint.save_dir, "metrics.jsonl"), record)
        if self.progress.is_printed(self.config):
            numbers = {name.replace("_", " "): value for name, value in record.items() if value is not None}
            print_line(" | ".join(f"{name} {value:.6g}" for name, value in numbers.items()))


class FrozenModel:
    """A second model in the layout of a run, for forward passes only, such as a teacher or the reference of DPO.

    Args:
        config: config of the run.
        folder: folder, or hub id, of the model. Its weights are in the run's dtype.
        device: see `set_up_device`.

    Raises:
        UserError: the model does not fit the layout, or its files are damaged.
    """

    def __init__(self, config: Config, folder: str, device: torch.device) -> None:
        config = config.model_copy(update={"model": Model(name=folder, dtype=config.model.dtype)})
        self.model_config, plan = check_model(config)
        check_same_config(config, self.model_config, plan.identity)
        dtype = getattr(torch, config.model.dtype)
        weights = Checkpoint(find_folder(folder), weights_only=True).weights()
        self.model: Any = build_stage(config, self.model_config, plan.wrap, device, dtype, weights)
        self.evaluate = make_evaluation(config, plan, device)

    def add_to(
        self, batches: Sequence[Batch], name: str, function: Callable[[Any, Tensor, Batch], Tensor]
    ) -> list[Batch]:
        """Add the outputs of a function to micro-batches as `name`, see `forward_batch`. Only the ranks with the last
        stage get them, because only these compute the loss.
        """
        outputs = forward_batch(self.evaluate, self.model, batches, function, merge=list)
        if outputs is None:
            return list(batches)
        return [batch | {name: output} for batch, output in zip(batches, outputs, strict=True)]
