"""Checkpoints, written: all ranks or none, now or in the background, in a folder that gets its name when it is whole.

A kill at any moment leaves a folder named *.unfinished, and all checkpoints before it as they are.
"""

import copy
import dataclasses
import json
import logging
import platform
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from picotron import process_group_manager as pgm
from picotron.checkpoint import STATE_FILE, TrainerState
from picotron.config import Config, UserError
from picotron.data import Progress
from picotron.model import Llama
from picotron.optimizer import AdamW
from picotron.run_folder import UNFINISHED, checkpoint_folder, checkpoint_folders, delete_checkpoint, sync_folder
from picotron.safetensors_folder import Part, write_file
from picotron.stage_files import Piece, StageFiles, Written
from picotron.utils import all_reduce, together

logger = logging.getLogger("picotron")


class CheckpointWriter:
    """Writes the checkpoints of a run. As a context it waits in the end for the one in flight, also after a mistake of
    the user's (as a learning rate that leads to NaN): what is being written is from before.

    Args:
        config, model_config: of the run.
        llama: this stage's part of the model.
        optimizer: of its parameters.
        tokenizer: the folder with the tokenizer's files, needed on rank 0.
        order: the name of the order of samples.
        wandb_run_id: of this run on rank 0, if it has one.
    """

    def __init__(
        self,
        config: Config,
        model_config: LlamaConfig,
        llama: Llama,
        optimizer: AdamW,
        tokenizer: Path,
        order: str,
        wandb_run_id: str | None = None,
    ) -> None:
        grid = pgm.process_group_manager
        self.config, self.order, self.wandb_run_id = config, order, wandb_run_id
        self.model_files = model_files(model_config, config.model.dtype, tokenizer) if grid.global_rank == 0 else {}
        self.save_dir = Path(config.checkpoint.save_dir)
        # Groups of their own, on the CPU: messages may come from a thread beside training, whatever the device.
        self.group, self.step_group = (dist.new_group(backend="gloo") for _ in range(2))
        self.files = StageFiles(llama, optimizer)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is None or (isinstance(error, UserError) and error is not self.error):
            self.wait()

    def after_step(self, progress: Progress, stop: int) -> None:
        """Write a checkpoint if it is time for one: every `save_frequency` steps, at the end, and before a stop.

        Raises:
            UserError: this one, or an earlier one in the background, cannot be written.
        """
        self._raise_error()
        frequency = self.config.checkpoint.save_frequency
        due = frequency and (progress.step % frequency == 0 or progress.is_end(self.config.training))
        if due or stop:
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; with `async_save` only copy it to host memory and let a thread write it.

        Raises:
            UserError: it cannot be written, on every rank. Earlier checkpoints stay.
        """
        self.wait()  # at most one in flight
        pieces = self.files.pieces() if pgm.process_group_manager.cp_dp_rank == 0 else []
        if self.config.checkpoint.async_save:
            pieces = [dataclasses.replace(piece, tensor=piece.tensor.to("cpu", copy=True)) for piece in pieces]
            self.thread = threading.Thread(target=self._write_in_background, args=(progress, pieces))
            self.thread.start()
        else:
            self._write(progress, pieces)

    def _write_in_background(self, progress: Progress, pieces: list[Piece]) -> None:
        try:
            self._write(progress, pieces)
        except BaseException as error:
            self.error = error

    def _raise_error(self) -> None:
        """Raise what went wrong in the background, on all ranks in the same step; every rank has to call this."""
        if self.thread is not None:
            failed = torch.tensor(int(self.error is not None))
            all_reduce(failed, self.step_group, dist.ReduceOp.MAX)
            if failed:
                self.wait()

    def wait(self) -> None:
        """Until nothing is in flight. Raises what went wrong in the background."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error

    def _write(self, progress: Progress, pieces: list[Piece]) -> None:
        began = time.perf_counter()
        first = pgm.process_group_manager.global_rank == 0
        final = checkpoint_folder(self.save_dir, progress.step)
        folder = final.with_name(final.name + UNFINISHED)

        def begin() -> None:
            if first:
                for left in self.save_dir.glob(f"step_*{UNFINISHED}"):  # by runs that were killed
                    delete_checkpoint(left)
                folder.mkdir(parents=True)

        try:
            self._together(final, begin)
            everyone = self._together(final, lambda: self.files.write(folder, pieces))
            written = [each for rank in everyone for each in rank]
            self._together(final, lambda: self._publish(folder, final, progress, written) if first else None)
        except UserError:
            if first:
                shutil.rmtree(folder, ignore_errors=True)  # a full disk has room again
            raise
        size = sum(part.size for each in written for part in each.parts)
        logger.info("checkpoint %s: %.3g GB in %.1f s", final, size / 1e9, time.perf_counter() - began)

    def _together(self, final: Path, work: Callable[[], Any]) -> list[Any]:
        def guarded() -> Any:
            try:
                return work()
            except OSError as error:
                raise UserError(
                    f"the checkpoint {final} cannot be written: {error.strerror}; make room there, or choose another "
                    f"save_dir that all processes can write. Earlier checkpoints are as they were"
                ) from None

        return together(guarded, self.group)

    def _publish(self, folder: Path, final: Path, progress: Progress, written: list[Written]) -> None:
        """Write everything that is not tensors; then the folder is whole, and gets its name."""
        files: dict[str, list[Part]] = defaultdict(list)
        for each in written:
            files[each.file] = sorted([*files[each.file], *each.parts], key=lambda part: part.start)
        for name, content in (self.model_files | self._indices(written)).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files[name] = write_file(folder / name, content)
        state = TrainerState(
            **dataclasses.asdict(progress),
            order_of_samples=self.order,
            seed=self.config.training.seed,
            layout=str(pgm.process_group_manager),
            config=self.config.model_dump(mode="json"),
            versions={"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
            wandb_run_id=self.wandb_run_id,
            files=files,
        )  # fmt: skip
        write_file(folder / STATE_FILE, state.to_json().encode())
        sync_folder(folder)
        folder.rename(final)
        sync_folder(final.parent)
        keep = self.config.checkpoint.keep_last
        for old in list(checkpoint_folders(self.save_dir).values())[:-keep] if keep else []:
            delete_checkpoint(old)

    def _indices(self, written: list[Written]) -> dict[str, bytes]:
        """For each kind, which file has which tensor. (Also of a single file: then no program that reads models takes
        the optimizer's files for parts of it.)
        """
        files: dict[str, dict[str, str]] = defaultdict(dict)
        sizes: dict[str, dict[str, int]] = defaultdict(dict)
        for each in written:
            files[each.kind] |= dict.fromkeys(each.sizes, each.file)
            sizes[each.kind] |= each.sizes
        indices = {
            kind: {"metadata": {"total_size": sum(sizes[kind].values())}, "weight_map": files[kind]} for kind in files
        }
        return {
            f"{kind}.safetensors.index.json": json.dumps(index, indent=2).encode() for kind, index in indices.items()
        }


def model_files(model_config: LlamaConfig, dtype: str, tokenizer_folder: Path) -> dict[str, bytes]:
    """The tokenizer's files, and a config.json with the true dimensions, the dtype and the tokenizer's end of text."""
    tokenizer, config = AutoTokenizer.from_pretrained(tokenizer_folder), copy.deepcopy(model_config)
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    paths = [path for path in tokenizer_folder.rglob("*") if path.is_file()]  # chat templates may have a folder
    files = {path.relative_to(tokenizer_folder).as_posix(): path.read_bytes() for path in paths}
    files["config.json"] = config.to_json_string().encode()
    files["generation_config.json"] = GenerationConfig.from_model_config(config).to_json_string().encode()
    return files
