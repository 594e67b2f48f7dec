"""Speed and memory of two models on one GPU, beside transformers, the forecast, the priced step and the estimate."""

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.report import Content, Options, Outcome, Part, header, row, seconds_of
from benchmarks.shapes import SHAPES
from benchmarks.workload import torch_adamw
from conformance.worker_pool import free_models
from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader
from picotron.data.rows import TextRows
from picotron.model.flops import model_cost
from picotron.model.placement import Index
from picotron.model.weights import ReadTensor
from picotron.optimizer.learning_rate import make_scheduler
from picotron.optimizer.optimizer import clip_grad_norm, make_optimizer
from picotron.parallelize import build_model
from picotron.process_group_manager import setup_process_group_manager
from picotron.run.config_reader import parse_config
from picotron.run.metrics import Metrics, peak_flops
from picotron.run.model_config import check_supported
from picotron.run.progress import Progress
from workbench.explain.memory import rank_memory
from workbench.explain.step_time import forecast
from workbench.pipelines.engine import make_train_step, plan_pipeline

ROWS = 16  # sequences of a step
MICRO_BATCH_SIZES = (4, 8, 16)
LIMIT, WHOLE_MODEL = 60.0, 150.0  # seconds of a row, with its compilation: of the layers, or of the whole model
PRICES = Path(__file__).with_name("prices.json")
TINY = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and the batches with which every trainer trains it.

    Args:
        name: name of the model.
        shape: keys of its config.
        length: tokens per sequence.
        device: device; on a CPU, a tiny model stands for the model.
        rows: sequences per micro-batch.
    """

    name: str
    shape: dict[str, Any]
    length: int
    device: torch.device
    rows: int = MICRO_BATCH_SIZES[0]

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
        return ROWS * self.config().training.seq_length

    def config(self, **training: Any) -> Config:
        """Return the config of a run, with changes of its section `training`."""
        length = 32 if self.device.type == "cpu" else self.length
        sizes = {"seq_length": length, "micro_batch_size": self.rows, "gradient_accumulation_steps": ROWS // self.rows}
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
    """Return the models."""
    return [
        Workload("SmolLM-1.7B", SHAPES["smollm-1.7b"], 2048, options.device),
        Workload("Llama-3.2-1B", SHAPES["llama-3.2-1b"], 4096, options.device),
    ]


def micro_batches(options: Options) -> list[Workload]:
    """Return both models with each size of the micro-batch; on a CPU, with the smallest one only."""
    sizes = MICRO_BATCH_SIZES if options.on_gpu else MICRO_BATCH_SIZES[:1]
    return [dataclasses.replace(each, rows=rows) for rows in sizes for each in workloads(options)]


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
    model = build_model(config, model_config, plan.wrap, device, dtype, random_weights(device))
    optimizer = make_optimizer(model, config)
    scheduler, loader = make_scheduler(optimizer, config.training), workload.loader()
    train_step = make_train_step(config, plan, device, dtype)
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


def transformers(workload: Workload, autocast: bool) -> Step:
    """Return a step of transformers' model with torch's fused AdamW.

    Args:
        autocast: True keeps weights, gradients and optimizer state in float32, and computes in bfloat16. False keeps
            everything in bfloat16, and compiles the whole model and its loss as one graph.
    """
    setup_process_group_manager(1, 1, 1, 1)  # for the data loader
    device, micro_batches = workload.device, ROWS // workload.rows
    with device:
        model = LlamaForCausalLM(workload.model).to(torch.float32 if autocast else torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    optimizer, loader = torch_adamw(model.parameters()), workload.loader()

    def loss_of(input_ids: Tensor, target_ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=input_ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), target_ids.flatten()) / micro_batches

    compute_loss = loss_of if autocast else torch.compile(loss_of)

    def step() -> None:
        total = torch.zeros((), device=device)
        for _ in range(micro_batches):
            batch = next(loader)
            loss = compute_loss(batch["input_ids"], batch["target_ids"])
            loss.backward()
            total += loss.detach()
            del loss
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(total + norm).item()

    return step


# --------------------------------------------------------------------------------------------------------------- rows


def free_memory(device: torch.device) -> None:
    """Free what earlier trainings have left, and reset the peak."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    free_models()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def speed_cells(workload: Workload, name: str, seconds: float, options: Options) -> list[str]:
    """Return the first cells of a row, about a step that takes some seconds."""
    tokens, length = workload.tokens_per_step, workload.config().training.seq_length
    flops = model_cost(workload.model, length).flops * tokens
    peak = peak_flops(torch.cuda.get_device_name(workload.device), torch.bfloat16) if options.on_gpu else None
    cells = [f"{1e3 * seconds:,.1f}", f"{tokens / seconds:,.0f}", f"{flops / seconds / peak:.1%}" if peak else "-"]
    return [workload.name, str(workload.rows), name, *cells]


def estimated_gb(workload: Workload, **training: Any) -> float:
    config = workload.config(**training)
    return rank_memory(config, workload.model, plan_pipeline(config, workload.model))[0].total / 1e9


def measured(
    workload: Workload, name: str, prepare: Callable[[], Step], estimate: float | None, options: Options
) -> Outcome:
    """Train, and return the row with the median time of the last three of five steps; on a CPU, of the second one."""
    device = workload.device
    free_memory(device)
    before = torch.cuda.memory_allocated(device) if options.on_gpu else 0
    warm_up, repeats = (2, 3) if options.on_gpu else (1, 1)
    seconds = statistics.median(seconds_of(prepare(), device, warm_up, repeats))
    cells = speed_cells(workload, name, seconds, options)
    if options.on_gpu:
        allocated, reserved = torch.cuda.max_memory_allocated(device) - before, torch.cuda.max_memory_reserved(device)
        cells += [f"{allocated / 1e9:.2f}", f"{reserved / 1e9:.2f}"]
    else:
        cells += ["-", "-"]
    free_memory(device)
    return Outcome([row([*cells, f"{estimate:.2f}" if estimate else "-"])])


def forecast_row(workload: Workload, options: Options) -> Outcome:
    """Return the row that `train.py --explain --hardware` forecasts."""
    config, hardware = workload.config(compile=options.compiled), options.hardware
    if hardware is None:
        return Outcome([row([workload.name, workload.rows, "forecast: this GPU is not in hardware.py", *["-"] * 6])])
    seconds = forecast(config, workload.model, plan_pipeline(config, workload.model), hardware).step_time
    cells = speed_cells(workload, f"forecast for {hardware.name}", seconds, options)
    return Outcome([row([*cells, "-", "-", f"{estimated_gb(workload):.2f}"])])


def priced_rows(workload: Workload, options: Options) -> Outcome:
    """Return the rows of the prices that benchmarks/gpu/prices.py has computed."""
    prices = json.loads(PRICES.read_text()).get(options.hardware and options.hardware.name)
    if prices is None:
        return Outcome([row([workload.name, workload.rows, "priced: this GPU is not in prices.json", *["-"] * 6])])
    times = prices[workload.name][str(workload.rows)].items()
    lines = [row([*speed_cells(workload, f"priced, {name}", seconds, options), *["-"] * 3]) for name, seconds in times]
    return Outcome(lines)


def trainings(options: Options) -> Iterator[Part]:
    """Yield the rows that train, those that matter most first."""

    def part(
        workload: Workload, name: str, prepare: Callable[[], Step], estimate: float | None, limit: float = LIMIT
    ) -> Part:
        run = functools.partial(measured, workload, name, prepare, estimate, options)
        return Part([workload.name, str(workload.rows), name], run, limit)

    def ours(workload: Workload, name: str, **training: Any) -> Part:
        return part(
            workload, name, functools.partial(picotron, workload, **training), estimated_gb(workload, **training)
        )

    kinds = {"picotron, compiled": True} if options.compiled else {}
    for workload in micro_batches(options):
        for name, compiles in (kinds | {"picotron, eager": False}).items():
            yield ours(workload, name, compile=compiles)
    for workload in workloads(options):
        if options.compiled:
            whole = functools.partial(transformers, workload, autocast=False)
            yield part(workload, "transformers, bfloat16, compiled as a whole", whole, None, WHOLE_MODEL)
    for workload in workloads(options):
        yield part(workload, "transformers, autocast", functools.partial(transformers, workload, autocast=True), None)
        yield ours(
            workload, "picotron, eager, activation checkpointing", activation_checkpointing="full", compile=False
        )


def speed_section(options: Options) -> Content:
    """Return the section of the report."""
    columns = ("ms per step", "tokens/s", "MFU", "allocated, GB", "reserved, GB", "estimate, GB")
    return [
        f"Training on one GPU from random weights on random tokens. A step has {ROWS} sequences (SmolLM-1.7B: of 2,048 tokens,",
        "Llama-3.2-1B: of 4,096), clipping and AdamW. The second column has the number of sequences of a micro-batch. Times are",
        "medians of three steps, after two others.",
        "",
        "- picotron: bfloat16 weights, and gradients, master weights and optimizer state in float32",
        "- transformers, autocast: `LlamaForCausalLM` with sdpa attention, torch's fused `AdamW`, everything kept in float32",
        "- transformers, bfloat16, compiled as a whole: nothing is kept in float32, so that rounding cancels most updates of the",
        "  weights, and `torch.compile` sees the model and its loss as one graph",
        "- forecast: the time that `train.py --explain --hardware` computes by formulas",
        "- priced: the time that benchmarks/roofline.py adds up from the prices of all operations, see benchmarks/gpu/prices.py",
        "",
        "MFU is relative to the data sheet. Allocated and reserved are the peaks of torch's allocator. The estimate is that of",
        "estimate.py, which leaves out temporary tensors and what torch.compile changes.",
        *header("model", "rows", "trainer", *columns),
        *(
            Part([each.name, str(each.rows), name], functools.partial(function, each, options), 20)
            for each in micro_batches(options)
            for name, function in {"forecast": forecast_row, "priced": priced_rows}.items()
        ),
        *trainings(options),
    ]
