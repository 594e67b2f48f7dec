"""Progress of a run, and its metrics: one record per step, for metrics.jsonl, wandb and the console."""

import dataclasses
import logging
import math
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.model.families import model_cost
from workbench.console import first_line, is_rank_0, print_line
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.run_folder import Record, write_record

if TYPE_CHECKING:
    from workbench.run.checkpoint.checkpoint import TrainerState

logger = logging.getLogger("picotron")

WANDB_SECONDS = 20.0
LONG_SECONDS = 900.0  # until the end of a run, from which on its lines say how long


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run: completed steps, tokens trained on, and the position in the data, in samples."""

    step: int = 0
    tokens: int = 0
    samples: int = 0

    def after_step(self, config: Config) -> "Progress":
        batch = config.global_batch_size
        return Progress(self.step + 1, self.tokens + batch * config.training.seq_length, self.samples + batch)

    def is_printed(self, config: Config) -> bool:
        """Return whether the console shows this step: the first, the last, and every `logging.log_frequency` steps."""
        return self.step == 1 or self.is_end(config) or self.step % config.logging.log_frequency == 0

    def remaining(self, config: Config) -> int:
        """Return the number of steps until the end of the run."""
        training, tokens = config.training, config.global_batch_size * config.training.seq_length
        steps = training.total_train_steps - self.step
        if training.max_tokens is not None:
            steps = min(steps, math.ceil((training.max_tokens - self.tokens) / tokens))
        return max(0, steps)

    def is_end(self, config: Config) -> bool:
        return self.remaining(config) == 0


# Peak dense bfloat16 FLOP/s from the vendors' data sheets. The first of these names that occurs in a device's name
# counts, so specific names precede general ones.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "T4": 65e12,  # in float16; it has no bfloat16
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device in bfloat16 and float16; None, and so no MFU, for CPUs, other dtypes and devices."""
    if dtype not in (torch.bfloat16, torch.float16) or re.search(
        r"MIG|Laptop|Max-Q| D$", device_name
    ):  # a share, or a slower version
        return None
    return next((flops for name, flops in PEAK_BF16_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GB (10^9 bytes): allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # On Linux, ru_maxrss begins with the peak of the process that has started this one.
    if (status := Path("/proc/self/status")).exists() and (peak := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(peak[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def max_over_ranks(device: torch.device, *numbers: float) -> Tensor:
    """Maximum of each number over all ranks, a vector on the device."""
    # torch.tensor would copy the numbers from the CPU, and wait for the GPU.
    maxima = torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])
    all_reduce(maxima, None, dist.ReduceOp.MAX)
    return maxima


def global_mean(loss: Tensor) -> Tensor:
    """Mean loss over the ranks of the last stage, a scalar on every rank. Ranks of other stages pass 0."""
    grid, mean = pgm.process_group_manager, loss.to(torch.float64, copy=True)
    all_reduce(mean, grid.cp_dp_group, dist.ReduceOp.AVG)
    all_reduce(mean, grid.pp_group)
    return mean


def evaluation_record(loss: Tensor, targets: int, text_bytes: int) -> Record:
    """Return the fields of an evaluation: the loss in nats per target, and in bits per byte of the targets' text, which
    models with different tokenizers have in common. Without text, the latter is None.

    Args:
        loss: mean loss of this rank's targets, see `global_mean`.
        targets, text_bytes: see `targets_and_bytes`.

    Raises:
        UserError: on every rank, if the loss is NaN or infinite.
    """
    if not math.isfinite(mean := global_mean(loss).item()):
        raise UserError(
            f"the loss on the evaluation set is {mean}, so the weights are broken; start from an earlier checkpoint, with a "
            f"lower learning_rate"
        )
    return {"eval_loss": mean, "bits_per_byte": mean * targets / (text_bytes * math.log(2)) if text_bytes else None}


def check_wandb(config: Config) -> None:
    """Raise a UserError if a config asks for wandb, and rank 0 cannot import it."""
    if config.logging.use_wandb and is_rank_0():
        try:
            import wandb  # noqa: F401 -- imported only on request
        except ImportError as error:
            raise UserError(
                f"logging.use_wandb=true, but wandb cannot be imported ({first_line(error)}); install it, or set the key to "
                f"false"
            ) from None


def check_finite(record: Mapping[str, Any], own_loss: Callable[[], float]) -> None:
    """Check that the loss and the gradient norm of a step's record, which are those of all ranks, are finite.

    Args:
        own_loss: function that returns this rank's loss, 0 without the last stage.

    Raises:
        UserError: on every rank, if the loss or the gradient norm is NaN or infinite.
    """
    for name in ("loss", "grad_norm"):
        if not math.isfinite(record[name]):
            losses = {rank: own for rank, own in enumerate(run_on_all_ranks(own_loss)) if own != 0}
            bad = [str(rank) for rank, own in losses.items() if not math.isfinite(own)]
            advice = f"try a lower learning_rate than {record['learning_rate']:g} or more warmup_steps"
            if 0 < len(bad) < len(losses):
                advice = f"only rank {', '.join(bad)} computed such a loss; look at the data and the device there"
            raise UserError(f"step {record['step']}: {name} is {record[name]}; {advice}")


def _start_wandb(config: Config, run_id: str | None, repeats: bool) -> Any:
    """Start a wandb run, or resume the one with the id `run_id`. It is offline without a login or network. WANDB_MODE
    and WANDB_PROJECT decide what the config leaves open.

    Args:
        repeats: whether steps that are in the wandb run are taken again. Wandb would ignore them, so a new run starts,
            in a group that is named after the earlier one, with all steps so far.

    Raises:
        UserError: wandb rejects a value of the config, or of a variable.
    """
    import wandb

    try:
        settings = wandb.setup().settings
        arguments: dict[str, Any] = {
            "project": config.logging.project_name or settings.project or "picotron",
            "name": config.logging.run_name,
            "dir": config.checkpoint.save_dir,
            "config": config.model_dump(),
            # Without git, there is no diff.patch of uncommitted changes, which may hold secrets.
            "settings": {"init_timeout": WANDB_SECONDS, "disable_git": True},
        }
        if run_id is not None:
            arguments |= {"group": run_id} if repeats else {"id": run_id, "resume": "allow"}
        if settings.mode == "online":
            try:
                if wandb.login(prompt=False, verify=False):
                    return wandb.init(**arguments)
                reason = "there is no login"
            except wandb.errors.Error as error:
                reason = first_line(error)
            logger.warning("wandb cannot go online (%s) and records offline; `wandb sync` uploads the run", reason)
            arguments["mode"] = "offline"
        return wandb.init(**arguments)
    except (ValueError, wandb.errors.Error) as error:
        raise UserError(
            f"wandb rejects its settings ({' '.join(str(error).split())}); correct logging.project_name or wandb's "
            f"environment variables, such as WANDB_MODE, or set logging.use_wandb to false"
        ) from None


class Metrics:
    """Collects the metrics of each step over all ranks and checks them. Rank 0 writes them.

    Args:
        config, model_config: config of the run and of its model.
        device, dtype: device and dtype in which the model computes, for memory and MFU.
        records: metrics that the run had logged before, see `begin_run`.
        resumed: state of the checkpoint in the run's folder from which it resumes.
    """

    def __init__(
        self,
        config: Config,
        model_config: PreTrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        records: Sequence[Record] = (),
        resumed: "TrainerState | None" = None,
    ) -> None:
        self.config, self.device = config, device
        self.path = Path(config.checkpoint.save_dir, "metrics.jsonl")
        self.tokens_per_step = config.global_batch_size * config.training.seq_length
        cost = model_cost(model_config, config.training.seq_length)
        self.flops_per_step = cost.flops * self.tokens_per_step
        self.peak_flops = peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", dtype)
        self.vocab_size = model_config.vocab_size
        kept = [record for record in records if resumed and record["step"] <= resumed.step]
        losses = [record["loss"] for record in kept if record.get("loss") is not None]
        self.first_loss, self.last_loss = (losses or [math.nan])[0], math.nan  # of the run, and of this process
        self.writes = pgm.process_group_manager.global_rank == 0
        self.wandb, self.wandb_run_id = None, resumed.wandb_run_id if resumed else None
        self.first: tuple[int, float] | None = None  # step that this run has logged, and when
        if self.writes and config.logging.use_wandb:
            repeats = self.wandb_run_id is not None and len(kept) < len(records)
            self.wandb = _start_wandb(config, self.wandb_run_id, repeats)
            self.wandb_run_id = self.wandb.id
            for record in kept if repeats else ():
                self.wandb.log(record, step=record["step"])
        logger.info(
            "%s%s | %s parameters, %s on %s",
            pgm.process_group_manager,
            f", ep {layout.ep_size}" if (layout := config.distributed).ep_size > 1 else "",
            f"{cost.parameters:,}",
            config.model.dtype,
            device,
        )
        self.start_step()

    def start_step(self) -> None:
        """Start the step's clock. The time between steps, in which checkpoints are saved, is not measured."""
        self.start = time.perf_counter()

    def end_step(
        self, progress: Progress, loss: Tensor, grad_norm: Tensor, learning_rate: float, stop: int = 0
    ) -> tuple[Record, int]:
        """Stop the step's clock, and return the step's record. Every rank must call this.

        Args:
            progress: progress after the step.
            loss: mean loss of this rank's tokens in the step, 0 if its stage has no loss; a scalar on the device.
            grad_norm: global gradient norm before clipping; a scalar on the device.
            learning_rate: learning rate of the step.
            stop: number of the stop signal that this rank has received, or 0.

        Returns:
            The record, for `log`, and the number of a stop signal that any rank has received, or 0.
        """
        grid = pgm.process_group_manager
        maxima = max_over_ranks(self.device, memory_gb(self.device), stop)
        numbers = torch.stack((*maxima, global_mean(loss), grad_norm.double()))
        # The only time in a step that the CPU waits for the GPU.
        memory, any_stop, mean_loss, norm = (number.item() for number in numbers.cpu())
        record: Record = {
            "step": progress.step,
            "loss": mean_loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
        }
        check_finite(record, loss.item)

        step_time = time.perf_counter() - self.start
        rate = self.tokens_per_step / step_time
        record |= {
            "tokens": progress.tokens,
            "step_time": step_time,
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / grid.world_size,
            "mfu": self.peak_flops and self.flops_per_step / step_time / (self.peak_flops * grid.world_size),
            "memory_gb": memory,
        }
        if any_stop:
            logger.info("%s: the run ends after this step", signal.Signals(int(any_stop)).name)
        return record, int(any_stop)

    def log(self, record: Record) -> None:
        """Write a record to metrics.jsonl, wandb and the console. That of step 0 has an evaluation only."""
        if trained := "loss" in record:
            self.last_loss = record["loss"]
            self.first_loss = self.last_loss if math.isnan(self.first_loss) else self.first_loss
        if not self.writes:
            return
        write_record(self.path, record)
        if self.wandb:
            self.wandb.log(record, step=record["step"])
        evaluated = "eval_loss" in record
        if trained and (evaluated or Progress(record["step"], record["tokens"]).is_printed(self.config)):
            mfu = "" if record["mfu"] is None else f" | mfu {record['mfu']:.1%}"
            print_line(
                f"step {record['step']:>4} | loss {record['loss']:.4f} | grad norm {record['grad_norm']:.3f} | "
                f"lr {record['learning_rate']:.1e} | {record['tokens']:,} tokens | "
                f"{record['tokens_per_second']:,.0f} tokens/s{mfu} | {record['memory_gb']:.2f} GB{self.time_left(record)}"
            )
        if evaluated:
            bits = "" if record["bits_per_byte"] is None else f" | {record['bits_per_byte']:.4f} bits per byte"
            print_line(f"step {record['step']:>4} | eval loss {record['eval_loss']:.4f}{bits}")

    def time_left(self, record: Record) -> str:
        """Return the estimated time until the end of a long run, from all that it has done since its first step."""
        now = time.perf_counter()
        self.first = self.first or (record["step"], now)
        steps, seconds = record["step"] - self.first[0], now - self.first[1]
        left = Progress(record["step"], record["tokens"]).remaining(self.config) * seconds / max(1, steps)
        return f" | {left / 3600:.1f} h left" if left >= LONG_SECONDS else ""

    def close(self) -> None:
        """Finish the wandb run, and log the first and last loss and the folder of the outputs."""
        if self.wandb:
            self.wandb.finish()
        uniform = math.log(self.vocab_size)  # loss of a model that gives all tokens the same probability
        if math.isnan(self.last_loss):
            logger.info("no steps were run: the checkpoint is already at total_train_steps or max_tokens")
        else:
            logger.info("loss %.4f -> %.4f (a uniform guess has %.4f)", self.first_loss, self.last_loss, uniform)
        logger.info("config.json and metrics.jsonl are in %s", Path(self.config.checkpoint.save_dir).resolve())
