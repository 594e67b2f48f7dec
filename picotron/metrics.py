"""What a run tells: a console line, a line of metrics.jsonl and a wandb record per step, from one object."""

import json
import logging
import math
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from picotron import process_group_manager as pgm
from picotron.checkpoint import Checkpoint
from picotron.config import Config, UserError, reason
from picotron.data import Progress
from picotron.model import Llama
from picotron.run_folder import begin_run, writing
from picotron.utils import all_reduce

logger = logging.getLogger("picotron")

# Peak dense bfloat16 FLOP/s by the vendors' data sheets, by a word of the device's name; the more special names first.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
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
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s in bfloat16; None (and so no MFU) for CPUs, other dtypes and devices not in the table."""
    if dtype != torch.bfloat16 or re.search(r"MIG|Laptop|Max-Q| D$", device_name):  # a part, or a slower version
        return None
    return next((flops for name, flops in PEAK_BF16_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def whole_model(config: LlamaConfig) -> Llama:
    """The model without its weights, and whatever the layout."""
    with torch.device("meta"):
        return Llama(config)


def flops_per_token(config: LlamaConfig, seq_length: int) -> float:
    """Forward and backward FLOPs that training needs per token: 6 N + 12 L H Q T (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B), where L layers have H heads of size Q and sequences have T tokens.

    N counts each parameter that a token is multiplied with: all, but for an embedding that is not also the head.
    Recomputed activations do not count: they are a cost, not work that was asked for.
    """
    model = whole_model(config)
    multiplied = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        multiplied -= model.model.embed_tokens.weight.numel()
    return 6 * multiplied + 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_length


def memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GB (10^9 bytes): allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def peak_memory(device: torch.device) -> Tensor:
    """`memory_gb` of the rank that needs most, a scalar."""
    memory = torch.tensor(memory_gb(device), dtype=torch.float64, device=device)
    all_reduce(memory, None, dist.ReduceOp.MAX)
    return memory


def global_mean(loss: Tensor) -> Tensor:
    """The mean over all ranks that have a loss, those of the last stage; the others have zeros. A scalar."""
    grid, mean = pgm.process_group_manager, loss.double()
    all_reduce(mean, grid.cp_dp_group, dist.ReduceOp.AVG)
    all_reduce(mean, grid.pp_group)
    return mean


def _start_wandb(config: Config, run_id: str | None) -> Any:
    """A wandb run, or the one with that id again; offline if there is no login, or no way to reach the server."""
    import wandb

    arguments: dict[str, Any] = {
        "project": config.logging.project_name,
        "name": config.logging.run_name,
        "dir": config.checkpoint.save_dir,
    }
    if run_id is not None:
        arguments |= {"id": run_id, "resume": "allow"}
    try:
        if wandb.login(prompt=False, verify=False):
            return wandb.init(**arguments, config=config.model_dump(), mode="online")
        why = "there is no login"
    except wandb.errors.Error as error:
        why = reason(error)
    logger.warning("wandb records offline in %s/wandb (%s); `wandb sync` uploads it", config.checkpoint.save_dir, why)
    return wandb.init(**arguments, config=config.model_dump(), mode="offline")


class Metrics:
    """Reduces a step's numbers over all ranks, checks them, and lets rank 0 write them down.

    Args:
        config, model_config: of the run.
        device, dtype: where and in what the model computes, for memory and MFU.
        checkpoint: where the run goes on from. If it lies in save_dir, the records there and the wandb run go on too.
    """

    def __init__(
        self,
        config: Config,
        model_config: LlamaConfig,
        device: torch.device,
        dtype: torch.dtype,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.config, self.device = config, device
        self.tokens_per_step = config.global_batch_size * config.training.seq_length
        self.flops_per_step = flops_per_token(model_config, config.training.seq_length) * self.tokens_per_step
        self.parameters = sum(p.numel() for p in whole_model(model_config).parameters())
        self.peak_flops = peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", dtype)
        self.first_loss = self.last_loss = math.nan
        self.vocab_size = model_config.vocab_size
        self.writes = pgm.process_group_manager.global_rank == 0
        self.wandb, self.wandb_run_id = None, None
        dist.barrier()  # nobody reads from an earlier run's folder any more
        if self.writes:
            save_dir = Path(config.checkpoint.save_dir)
            same_run = checkpoint is not None and checkpoint.folder.resolve().parent == save_dir.resolve()
            continued = checkpoint.state if checkpoint is not None and same_run else None
            with writing(save_dir):
                records = begin_run(save_dir, config, None if continued is None else continued.step)
            if records:
                self.first_loss, self.last_loss = records[0]["loss"], records[-1]["loss"]
            self.path = save_dir / "metrics.jsonl"
            self.wandb_run_id = None if continued is None else continued.wandb_run_id
            if config.logging.use_wandb:
                self.wandb = _start_wandb(config, self.wandb_run_id)
                self.wandb_run_id = self.wandb.id
        logger.info(
            "%s | %s parameters, %s on %s",
            pgm.process_group_manager,
            f"{self.parameters:,}",
            config.model.dtype,
            device,
        )
        self.start_step()

    def start_step(self) -> None:
        """The step's time begins: what was done since the last one, as saving a checkpoint, does not count."""
        self.start = time.perf_counter()

    def log(
        self,
        progress: Progress,
        loss: Tensor,
        grad_norm: Tensor,
        learning_rate: float,
        evaluate: Callable[[], Tensor],
    ) -> None:
        """Record a step.

        Args:
            progress: after it.
            loss: this rank's mean over its tokens of the step, 0 if its stage has none; a scalar on the device.
            grad_norm: the global one, before clipping; a scalar on the device.
            evaluate: called every `eval_frequency` steps for such a loss on other data; its time is not the step's.

        Raises:
            UserError: the loss or the gradient norm is NaN or infinite, on every rank alike.
        """
        grid = pgm.process_group_manager
        memory = peak_memory(self.device)
        record: dict[str, Any] = {
            "step": progress.step,
            "loss": global_mean(loss).item(),
            "grad_norm": grad_norm.item(),
            "learning_rate": learning_rate,
        }
        for name in ("loss", "grad_norm"):
            if not math.isfinite(record[name]):
                raise UserError(
                    f"step {progress.step}: {name} is {record[name]}; try a lower learning_rate than {learning_rate:g}, or more warmup_steps"
                )

        step_time = time.perf_counter() - self.start
        rate = self.tokens_per_step / step_time
        record |= {
            "tokens": progress.tokens,
            "step_time": step_time,
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / grid.world_size,
            "mfu": self.peak_flops and self.flops_per_step / step_time / (self.peak_flops * grid.world_size),
            "memory_gb": memory.item(),
        }
        frequency = self.config.training.eval_frequency
        if frequency and progress.step % frequency == 0:
            record["eval_loss"] = global_mean(evaluate()).item()
        if math.isnan(self.first_loss):
            self.first_loss = record["loss"]
        self.last_loss = record["loss"]
        if self.writes:
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        with writing(self.path), self.path.open("a") as file:  # closed after every step: a killed run has all its lines
            file.write(json.dumps(record) + "\n")
        if self.wandb:
            self.wandb.log(record, step=record["step"])
        evaluated = "eval_loss" in record
        if evaluated or record["step"] % self.config.logging.log_frequency == 0 or record["step"] == 1:
            mfu = "" if record["mfu"] is None else f" | mfu {record['mfu']:.1%}"
            eval_loss = f" | eval loss {record['eval_loss']:.4f}" if evaluated else ""
            print(
                f"step {record['step']:>5} | loss {record['loss']:.4f}{eval_loss} | grad norm {record['grad_norm']:.3f} | "
                f"lr {record['learning_rate']:.2e} | {record['tokens']:,} tokens | "
                f"{record['tokens_per_second']:,.0f} tokens/s{mfu} | {record['memory_gb']:.2f} GB",
                flush=True,
            )

    def close(self) -> None:
        """The last words of a run."""
        if self.wandb:
            self.wandb.finish()
        guess = math.log(self.vocab_size)
        logger.info("loss %.4f -> %.4f (a uniform guess has %.4f)", self.first_loss, self.last_loss, guess)
        logger.info("config.json and metrics.jsonl are in %s", Path(self.config.checkpoint.save_dir).resolve())
