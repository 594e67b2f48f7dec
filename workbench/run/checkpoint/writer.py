"""Writer of checkpoints, in the foreground or in the background. Either all ranks write a checkpoint, or none does.

A folder gets its final name when it is complete. A run that is killed leaves at most a folder named *.unfinished, and
its earlier checkpoints stay intact.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import platform
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.model.families import differences
from picotron.model.llama import Llama
from picotron.optimizer import AdamW
from workbench.files import UNFINISHED, new_folder, unfinished
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.checkpoint.checkpoint import STATE_FILE, FileRanges, TrainerState, read_state
from workbench.run.checkpoint.host_buffers import HostBuffers
from workbench.run.checkpoint.safetensors_folder import write_file
from workbench.run.checkpoint.stage_files import StageFiles, TensorSlice, WrittenFile
from workbench.run.metrics import Progress
from workbench.run.model_config import end_tokens, ends_of, ends_of_both
from workbench.run.run_folder import checkpoint_folder, checkpoint_folders, delete_checkpoint, read_records, start_of

logger = logging.getLogger("picotron")

NFS_CACHE_SECONDS = 60  # by default, an NFS client may not see a new file for this long


class CheckpointWriter:
    """Writes the checkpoints of a run. As a context manager, it waits on exit for a checkpoint in progress. It does so
    even after a UserError (such as a loss of NaN), because the checkpoint is from before the error. (After another
    error, it waits only with one rank: the others may not come.)

    Args:
        config, model_config: config of the run and of its model.
        llama: this rank's part of the model.
        optimizer: optimizer of its parameters.
        tokenizer: folder with the tokenizer's files, used on rank 0; None: checkpoints have no tokenizer.
        fingerprint: fingerprint of the training data, see `data_fingerprint`.
        wandb_run_id: id of the wandb run, used on rank 0.
    """

    def __init__(
        self,
        config: Config,
        model_config: PreTrainedConfig,
        llama: Llama,
        optimizer: AdamW,
        tokenizer: Path | None,
        fingerprint: str,
        wandb_run_id: str | None = None,
    ) -> None:
        grid, self.save_dir = pgm.process_group_manager, Path(config.checkpoint.save_dir)
        self.config, self.fingerprint, self.wandb_run_id = config, fingerprint, wandb_run_id
        self.model_files: dict[str, bytes] = {}
        self.start: str | None = None
        if grid.global_rank == 0:
            self.model_files = model_files(model_config, config.model.dtype, tokenizer, config.training.seq_length)
            kept = [*checkpoint_folders(self.save_dir).values()]  # of this run, if it resumes
            earlier = read_state(kept[-1]) if kept else None
            self.start = earlier.start if earlier else start_of(config)
        # Separate groups, because a background thread may call collectives during training; gloo for data on the CPU.
        self.group, self.step_group = (dist.new_group(backend="gloo") for _ in range(2))
        self.files, self.buffers = StageFiles(llama, optimizer, config.distributed.ep_size, self.group), HostBuffers()
        self.executor = ThreadPoolExecutor(1)
        self.in_progress: Future[None] | None = None
        self._check_shared()  # before the first step, not when the first checkpoint is written
        match config.checkpoint.save_frequency:
            case None:
                logger.info("no checkpoint will be written (checkpoint.save_frequency=null)")
            case 0:
                logger.info("a checkpoint will be written at the end")
            case frequency:
                logger.info("a checkpoint will be written every %d steps, and at the end", frequency)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is None or isinstance(error, UserError) or dist.get_world_size() == 1:
            self.wait()

    def _check_shared(self) -> None:
        """Raise a UserError on every rank unless all ranks see what rank 0 writes to `save_dir`."""
        file = self.save_dir / f".shared-{self._on_all_ranks(self.save_dir, lambda: uuid.uuid4().hex)[0]}"

        def is_seen() -> bool:
            if pgm.process_group_manager.global_rank == 0:
                self.save_dir.mkdir(parents=True, exist_ok=True)
                file.touch()
            end = time.monotonic() + NFS_CACHE_SECONDS
            while not (seen := file.exists()) and time.monotonic() < end:
                time.sleep(0.1)
            return seen

        try:
            seen = self._on_all_ranks(self.save_dir, is_seen)
        finally:
            file.unlink(missing_ok=True)
        if False in seen:
            raise UserError(
                f"rank {seen.index(False)} does not see the files of rank 0 in {self.save_dir}; checkpoint.save_dir must be "
                f"a folder that all machines share"
            )

    def is_due(self, progress: Progress, before: int | None = None) -> bool:
        """Whether to write a checkpoint after this step, as `checkpoint.save_frequency` says.

        Args:
            before: the number of steps at the last call, if several steps have been taken since then.
        """
        frequency, before = self.config.checkpoint.save_frequency, progress.step - 1 if before is None else before
        if frequency is None:
            return False
        is_between = frequency > 0 and progress.step // frequency > before // frequency
        return is_between or progress.is_end(self.config)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, unless there is one of this step. With `async_save`, copy it to host memory and start a
        thread that writes it.

        Raises:
            UserError: on every rank, if the checkpoint cannot be written. Earlier checkpoints stay.
        """
        self.wait()  # at most one checkpoint is in progress, so no thread reads the buffers that a snapshot overwrites
        slices, state = self.files.slices(), getattr(self.files.optimizer, "loss_scale", None)
        scale = dict(vars(state)) if state else {}  # as it is now, although a thread writes it later
        if self.config.checkpoint.async_save:
            copies = self.buffers.snapshot([each.tensor for each in slices])
            slices = [dataclasses.replace(each, tensor=host) for each, host in zip(slices, copies, strict=True)]
            self.in_progress = self.executor.submit(self._write, progress, slices, scale)
        else:
            self._write(progress, slices, scale)

    def check(self) -> None:
        """Raise the error of a background save, on all ranks in the same step. Every rank must call this."""
        if self.in_progress is not None:
            failed = torch.tensor(int(self.in_progress.done() and self.in_progress.exception() is not None))
            all_reduce(failed, self.step_group, dist.ReduceOp.MAX)
            if failed:
                self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is in progress. Raises the error of a background save."""
        saved, self.in_progress = self.in_progress, None
        if saved is not None:
            saved.result()

    def _write(self, progress: Progress, slices: list[TensorSlice], scale: dict[str, float]) -> None:
        """Write a checkpoint together with all other ranks, and remove its folder if any of them fails.

        Args:
            scale: the attributes of a loss scale, or {}.
        """
        began = time.perf_counter()
        is_rank_0 = pgm.process_group_manager.global_rank == 0
        final = checkpoint_folder(self.save_dir, progress.step)
        folder = unfinished(final)
        with contextlib.ExitStack() as complete:  # rank 0 renames the folder, or after an error deletes it

            def begin() -> bool:
                is_new = not final.exists()
                if is_rank_0 and is_new:
                    for leftover in self.save_dir.glob(f"step_*{UNFINISHED}"):  # of runs that were killed
                        delete_checkpoint(leftover)
                    complete.enter_context(new_folder(final))
                return is_new

            def finish() -> None:
                if is_rank_0:
                    self._write_files_without_tensors(folder, progress, written, scale)
                    complete.close()
                    self._delete_old()

            if not self._on_all_ranks(final, begin)[0]:
                logger.warning("%s exists already, and is not written again", final)
                return
            files_by_rank = self._on_all_ranks(final, lambda: self.files.write(folder, slices))
            written = [file for files in files_by_rank for file in files]
            self._on_all_ranks(final, finish)
        size = sum(byte_range.size for file in written for byte_range in file.ranges)
        logger.info("checkpoint %s: %.3g GB in %.1f s", final, size / 1e9, time.perf_counter() - began)

    def _on_all_ranks(self, final: Path, function: Callable[[], Any]) -> list[Any]:
        """Call `run_on_all_ranks`, and convert an OSError to a UserError about the checkpoint."""

        def guarded() -> Any:
            try:
                return function()
            except OSError as error:
                raise UserError(
                    f"the checkpoint {final} cannot be written: {error.strerror}; free some space, or choose another "
                    f"save_dir that all processes can write. Earlier checkpoints are unchanged"
                ) from None

        return run_on_all_ranks(guarded, self.group)

    def _write_files_without_tensors(
        self, folder: Path, progress: Progress, written: list[WrittenFile], scale: dict[str, float]
    ) -> None:
        """Write the model's other files, the indices, and last the state with the checksums of all files."""
        files: FileRanges = defaultdict(list)
        for each in written:
            files[each.file] = sorted([*files[each.file], *each.ranges], key=lambda each: each.start)
        for name, content in (self.model_files | self._indices(written)).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files[name] = write_file(folder / name, [(0, content)])
        state = TrainerState(
            **dataclasses.asdict(progress),
            data_fingerprint=self.fingerprint,
            loss_scale=scale,
            seed=self.config.training.seed,
            layout=str(pgm.process_group_manager),
            config=self.config.model_dump(mode="json"),
            versions={"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
            wandb_run_id=self.wandb_run_id,
            start=self.start,
            files=files,
        )  # fmt: skip
        write_file(folder / STATE_FILE, [(0, state.to_json().encode())])

    def _delete_old(self) -> None:
        """Delete all checkpoints but the last ones that the config keeps, and the best one."""
        config, found = self.config.checkpoint, checkpoint_folders(self.save_dir)
        records, _ = read_records(self.save_dir / "metrics.jsonl", "eval_loss") if config.keep_best else ([], "")
        losses = {each["step"]: each["eval_loss"] for each in records if each["step"] in found and "eval_loss" in each}
        best = min(losses, key=lambda step: losses[step], default=None)
        for step in [*found][: -config.keep_last] if config.keep_last else []:
            if step != best:
                delete_checkpoint(found[step])

    def _indices(self, written: list[WrittenFile]) -> dict[str, bytes]:
        """Return the index of each kind, which maps tensors to files. (A single file has one, too, so that no program
        loads the optimizer's files as a part of the model.)
        """
        indices = {}
        for kind in {each.kind for each in written}:
            of_kind = [each for each in written if each.kind == kind]
            sizes = {name: size for each in of_kind for name, size in each.sizes.items()}  # ranks may share a tensor
            files = {name: each.file for each in of_kind for name in each.sizes}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
            indices[f"{kind}.safetensors.index.json"] = json.dumps(index, indent=2).encode()
        return indices


def model_files(
    model_config: PreTrainedConfig, dtype: str, tokenizer_folder: Path | None, length: int = 0
) -> dict[str, bytes]:
    """Return the tokenizer's files, if there is one, and a config.json and a generation_config.json with the special
    tokens. The first also has the run's dimensions, dtype and, if it is longer than the model's texts, length.

    The end tokens are those of the model and of the tokenizer, see `ends_of_both`.
    """
    config, files = copy.deepcopy(model_config), {}
    config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]], dtype
    config.max_position_embeddings = max(config.max_position_embeddings, length)
    if tokenizer_folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        config.bos_token_id = tokenizer.bos_token_id
        if unknown := {*ends_of(tokenizer)} - {tokenizer.eos_token_id, *end_tokens(config)}:
            (name,) = tokenizer.convert_ids_to_tokens([*unknown])
            logger.warning(
                "the chat template ends answers with %r, which is no end for the tokenizer and the model; checkpoints name it "
                "as one", name
            )  # fmt: skip
        ends = ends_of_both(config, tokenizer)
        config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
        paths = [path for path in tokenizer_folder.rglob("*") if path.is_file()]  # chat templates may be in a subfolder
        files = {path.relative_to(tokenizer_folder).as_posix(): path.read_bytes() for path in paths}
        options = json.loads(files.get("tokenizer_config.json", b"{}"))
        if (
            options.get("tokenizer_class") == "TokenizersBackend"
        ):  # which transformers 4 does not know, and 5 reads alike
            options["tokenizer_class"] = "PreTrainedTokenizerFast"
            files["tokenizer_config.json"] = json.dumps(options, indent=2, ensure_ascii=False).encode()
    data = json.loads(config.to_json_string()) | earlier_keys(config)
    files["config.json"] = f"{json.dumps(data, indent=2, sort_keys=True)}\n".encode()
    files["generation_config.json"] = GenerationConfig.from_model_config(config).to_json_string().encode()
    return files


def earlier_keys(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys of a config.json that transformers 4 and other programs read instead of `rope_parameters`,
    `dtype` and, in some families, the number of experts. Without these keys, the rotary embeddings have other
    frequencies there, without a warning.
    """
    rope, experts = dict(config.rope_parameters), differences(config).experts
    theta = rope.pop("rope_theta")
    return {
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
        **({"num_experts": experts.number, "num_local_experts": experts.number} if experts else {}),
    }
