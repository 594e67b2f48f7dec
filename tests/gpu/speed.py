"""Speed and memory of two models on one GPU, compared with transformers and with the estimate of memory."""

import contextlib
import dataclasses
import functools
import gc
import statistics
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.workload import torch_adamw
from picotron.config import Config
from picotron.config_reader import parse_config
from picotron.data import MicroBatchDataLoader, Progress
from picotron.explain.estimate import rank_memory
from picotron.metrics import Metrics, memory_gb, peak_flops
from picotron.model_config import check_supported
from picotron.optimizer import AdamW, clip_grad_norm, make_scheduler
from picotron.parallelize import build_model
from picotron.process_group_manager import setup_process_group_manager
from picotron.rows import TextRows
from picotron.schedules.costs import model_cost
from picotron.schedules.plan import plan_pipeline
from picotron.train_step import make_train_step
from picotron.weights import Index, ReadTensor
from tests.gpu.report import Lines, Options, header, row, seconds_of
from tests.support.shapes import SHAPES

MICRO_BATCHES = 4
BASELINE = "transformers, autocast"
TINY = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and the batches with which every trainer trains it.

    Args:
        name: name of the model.
        shape: keys of its config.
        rows, length: sequences per micro-batch, and tokens per sequence.
        device: device; on a CPU, a tiny model stands for the model.
    """

    name: str
    shape: dict[str, Any]
    rows: int
    length: int
    device: torch.device

    @property
    def model(self) -> LlamaConfig:
        shape = dict(self.shape)
        if self.device.type == "cpu":
            groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
            shape |= TINY | {"num_key_value_heads": 4 // groups, "head_dim": 16}
        model = LlamaConfig(**shape, pad_token_id=None)
        check_supported(model)
        return model

    @property
    def tokens_per_step(self) -> int:
        return MICRO_BATCHES * self.rows * self.config().training.seq_length

    def config(self, **training: Any) -> Config:
        """Return the config of a run, with changes of its section `training`."""
        length = 32 if self.device.type == "cpu" else self.length
        sizes = {"seq_length": length, "micro_batch_size": self.rows, "gradient_accumulation_steps": MICRO_BATCHES}
        return parse_config(
            {
                "distributed": {"use_cpu": self.device.type == "cpu"},
                "model": {"name": self.name, "dtype": "bfloat16"},
                "training": sizes | training,
                "dataset": {"name": "random tokens"},
            }
        )

    def loader(self) -> MicroBatchDataLoader:
        config = self.config()
        count = config.training.seq_length * 256 + 1
        tokens = np.random.default_rng(0).integers(self.model.vocab_size, size=count).astype(np.uint32)
        return MicroBatchDataLoader(TextRows(tokens, config.training.seq_length), config, self.device)


def workloads(options: Options) -> list[Workload]:
    """Return the models, with micro-batches of 8,192 tokens."""
    return [
        Workload("SmolLM-1.7B", SHAPES["smollm-1.7b"], 4, 2048, options.device),
        Workload("Llama-3.2-1B", SHAPES["llama-3.2-1b"], 2, 4096, options.device),
    ]


def random_weights(device: torch.device) -> ReadTensor:
    """Return a reader of random weights that are drawn on the device, which takes no time."""

    def draw(name: str, shape: torch.Size, index: Index) -> Tensor:
        weight = torch.ones(shape, device=device)
        return (weight if name.endswith("norm.weight") else weight.normal_(0, 0.02))[index]

    return draw


# ------------------------------------------------------------------------------------------------------- the two loops


def picotron(workload: Workload, **training: Any) -> Step:
    """Return a step of picotron: the body of the training loop of train.py, with its metrics."""
    setup_process_group_manager(1, 1, 1, 1)
    config, device, model_config, dtype = workload.config(**training), workload.device, workload.model, torch.bfloat16
    plan = plan_pipeline(config, model_config)
    model = build_model(config, model_config, plan, device, dtype, random_weights(device))
    optimizer = AdamW(model.parameters(), config.training, config.model.use_fused_adam)
    scheduler, loader = make_scheduler(optimizer, config.training), workload.loader()
    train_step = make_train_step(config, model_config, plan, device, dtype)
    metrics = Metrics(config, model_config, device, dtype)

    def step() -> None:
        metrics.start_step()
        loss = train_step(model, loader)
        grad_norm = clip_grad_norm(model, config.training.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        metrics.end_step(Progress(), loss, grad_norm, learning_rate=0.0)

    return step


def transformers(workload: Workload, autocast: bool, compiled: bool = False) -> Step:
    """Return a step of transformers' model with torch's fused AdamW.

    Args:
        autocast: True keeps weights, gradients and optimizer state in float32, and computes in bfloat16; False keeps
            everything in bfloat16.
    """
    setup_process_group_manager(1, 1, 1, 1)
    device = workload.device
    with device:
        model = LlamaForCausalLM(workload.model).to(torch.float32 if autocast else torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    for layer in model.model.layers if compiled else ():
        layer.compile()
    optimizer, loader = torch_adamw(model.parameters()), workload.loader()

    def step() -> None:
        total = torch.zeros((), device=device)
        for _ in range(MICRO_BATCHES):
            batch = next(loader)
            with torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
                logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["target_ids"].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
            del logits, loss
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(total + norm).item()

    return step


# -------------------------------------------------------------------------------------------------------- measurements


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A row of the table. `config` is that of a picotron run, for the estimate of its memory."""

    name: str
    prepare: Callable[[], Step]
    config: Config | None = None
    compiled: bool = False

    @property
    def baseline(self) -> str:
        """Name of the row to compare with."""
        return BASELINE + ", compiled" * self.compiled


def trainers(workload: Workload) -> list[Trainer]:
    ours, theirs = functools.partial(picotron, workload), functools.partial(transformers, workload)
    full, compiled = {"activation_checkpointing": "full"}, {"compile": True}
    return [
        Trainer(BASELINE, functools.partial(theirs, autocast=True)),
        Trainer("transformers, all in bfloat16", functools.partial(theirs, autocast=False)),
        Trainer("picotron", ours, workload.config()),
        Trainer("picotron, activation checkpointing", functools.partial(ours, **full), workload.config(**full)),
        Trainer(f"{BASELINE}, compiled", functools.partial(theirs, autocast=True, compiled=True), compiled=True),
        Trainer("picotron, compiled", functools.partial(ours, **compiled), workload.config(**compiled), True),
    ]


def free_memory(device: torch.device) -> float:
    """Free what earlier trainings have left, and reset the peak. Returns the GB that are still allocated."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if device.type == "cpu":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 1e9


def measure(prepare: Callable[[], Step], device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a step, after warm-up, and the peak memory in GB."""
    before = free_memory(device)
    seconds = seconds_of(prepare(), device, warm_up=3, repeats=5 if device.type == "cuda" else 1)
    return statistics.median(seconds), memory_gb(device) - before


def measured_row(workload: Workload, trainer: Trainer, found: dict[tuple[str, str], float]) -> str:
    """Measure a trainer, and add its seconds per step to `found`, where the rows above are."""
    seconds, memory = measure(trainer.prepare, workload.device)
    found[workload.name, trainer.name] = seconds
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    name = f"{trainer.name} (graphs: {graphs})" if trainer.compiled else trainer.name

    tokens, device = workload.tokens_per_step, workload.device
    flops = model_cost(workload.model, workload.config().training.seq_length).flops * tokens
    peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16) if device.type == "cuda" else None
    baseline = found.get((workload.name, trainer.baseline))
    cells = [f"{1e3 * seconds:,.1f}", f"{tokens / seconds:,.0f}", f"{flops / seconds / peak:.1%}" if peak else "-"]
    cells += [f"{baseline / seconds:.2f}" if baseline else "-", f"{memory:.2f}"]
    if trainer.config is None:
        return row([workload.name, name, *cells, "-", "-"])
    plan = plan_pipeline(trainer.config, workload.model)
    estimate = rank_memory(trainer.config, workload.model, plan)[0].total / 1e9
    return row([workload.name, name, *cells, f"{estimate:.2f}", f"{memory / estimate:.2f}"])


def speed_section(options: Options) -> Lines:
    """Yield the section of the report."""
    yield f"Training on one GPU from random weights on random tokens. A step has {MICRO_BATCHES} micro-batches of 8,192 tokens (SmolLM-1.7B: 4"
    yield "sequences of 2,048, Llama-3.2-1B: 2 of 4,096), clipping and AdamW. Times are medians of five steps, after three others."
    yield ""
    yield "- picotron: bfloat16 weights, and gradients, master weights and optimizer state in float32"
    yield "- transformers, autocast: `LlamaForCausalLM` with sdpa attention, torch's fused `AdamW`, everything kept in float32"
    yield "- transformers, all in bfloat16: the same without float32, so that rounding cancels most updates of the weights"
    yield ""
    yield "Relative speed compares with transformers under autocast, compiled if the row is. MFU is relative to the data sheet. The"
    yield "estimate is that of estimate.py, which leaves out temporary tensors and what torch.compile changes."
    columns = (
        "ms per step",
        "tokens/s",
        "MFU",
        "relative speed",
        "peak memory, GB",
        "estimate, GB",
        "measured / estimate",
    )
    yield from header("model", "trainer", *columns)
    found: dict[tuple[str, str], float] = {}
    failures = []
    for compiled in (False, True) if options.compiled else (False,):  # the rows that may take long come last
        for workload in workloads(options):
            for trainer in trainers(workload):
                if trainer.compiled == compiled:
                    try:
                        yield measured_row(workload, trainer, found)
                    except Exception as error:
                        yield row([workload.name, trainer.name, f"**{type(error).__name__}**", *["-"] * 6])
                        failures.append(f"{workload.name}, {trainer.name}: {traceback.format_exc(limit=-4)}")
    yield ""
    if failures:
        raise AssertionError("\n".join(failures))
