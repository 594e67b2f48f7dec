"""Training on one GPU and in every layout that the GPUs allow, compared with one process of transformers."""

import functools
import itertools
import math
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from benchmarks.gpu.errors import name_of
from benchmarks.gpu.report import Check, Content, Options, checked, header
from benchmarks.gpu.staged import batch_isend_irecv
from benchmarks.shapes import LLAMA3_ROPE
from conformance.grid import LAYOUTS, features, largest_errors, settings
from conformance.oracle import make_config, oracle_training, random_tokens, relative_error, tiny_llama
from conformance.training import train
from conformance.worker_pool import CONTEXT, WorkerPool
from picotron.config import Config
from workbench.schedules.schedules import SCHEDULES


def errors_of(result: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Return the relative errors of the losses, the gradient norms and the first step's gradients."""
    found = [relative_error(result[kind], reference[kind]) for kind in ("losses", "grad_norms")]
    gradients = reference["gradients"]
    return [*found, max(relative_error(result["gradients"][name], each) for name, each in gradients.items())]


# --------------------------------------------------------------------------------------------------------- one process

# A mistake changes the first digits. Both trainers compute rotary angles in float32 even if all other numbers are in
# float64, and on a GPU, two ways to write a formula may round differently. In bfloat16, both are far from float64.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1}


def one_process(options: Options) -> tuple[Config, PreTrainedConfig]:
    """Return the training that both trainers do on one process: five steps of two micro-batches."""
    config = make_config(
        distributed__use_cpu=not options.on_gpu,
        training__total_train_steps=5,
        training__seq_length=128 if options.on_gpu else 16,
        training__gradient_accumulation_steps=2,
        training__learning_rate=1e-3,
        training__compile=False,
        dataset__shuffle=False,
    )
    sizes = {
        "num_hidden_layers": 4,
        "initializer_range": 0.02,
        "rope_parameters": LLAMA3_ROPE,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
    }
    if options.on_gpu:
        sizes |= {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4096}
    return config, tiny_llama(**sizes)


def with_dtype(config: Config, dtype: torch.dtype) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": name_of(dtype)})})


def transformers_section(options: Options) -> Content:
    """Return the section of the report."""
    config, model_config = one_process(options)

    @functools.cache
    def transformers(dtype: torch.dtype) -> dict[str, Any]:
        return oracle_training(config, model_config, random_tokens(), dtype, options.device)

    def picotron(dtype: torch.dtype) -> dict[str, Any]:
        return train(with_dtype(config, dtype), model_config)

    def checks() -> Iterator[Check]:
        for dtype, (name, trainer) in itertools.product(
            (torch.float32, torch.bfloat16, torch.float64), {"picotron": picotron, "transformers": transformers}.items()
        ):
            if (name, dtype) != ("transformers", torch.float64):  # the reference itself

                def errors(trainer: Any = trainer, dtype: torch.dtype = dtype) -> Sequence[float]:
                    return errors_of(trainer(dtype), transformers(torch.float64))

                limit = LIMITS[dtype] if name == "picotron" else math.inf
                yield Check([name, name_of(dtype)], errors, limit, judged=3)

    return [
        "Five steps of training from the same weights on the same data. The reference is transformers' `LlamaForCausalLM` with",
        "torch's `AdamW` on one process, in float64 on the same device. In bfloat16, picotron has bfloat16 weights and float32",
        "master weights, and transformers has float32 weights under autocast. An error is the largest |a - b| divided by the",
        "largest |b|, over the losses, over the gradient norms, and over each gradient of the first step.",
        *header("trainer", "dtype", "losses", "gradient norms", "gradients", "limit", "result"),
        *checked(checks(), limit=30),
    ]


# -------------------------------------------------------------------------------------------------------- every layout

# Layouts of two ranks; conformance.grid has those of four and more.
TWO_RANKS = [
    "dp2 untied kv4 llama",
    "dp2 zero1 untied kv4 llama",
    "dp2 zero3 untied kv4 llama",
    "tp2 tied kv4 llama",
    "tp2 sp untied kv1 llama",
    "tp2 untied kv4 qwen3",
    *(
        f"cp2 {sharding} {engine} tied kv8 llama"
        for sharding in ("zigzag", "contiguous")
        for engine in ("ring", "all_gather", "ulysses")
    ),
    *(f"pp2 {schedule} tied kv4 llama" for schedule in SCHEDULES),
]
SHARED = 4  # ranks, on fewer GPUs: they communicate through gloo, with staged messages
ROW = 60.0  # seconds of a layout, with the start of its processes
COMPILED = {"training": {"compile": True}, "model": {"dtype": "float32"}}  # torch 2.11 cannot in float64, on a CPU
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "activation checkpointing": {"training": {"activation_checkpointing": "full"}},
    "selective recomputation": {"training": {"activation_checkpointing": "selective"}},
    "plain attention": {"model": {"use_flash_attention": False}},
    "AdamW not fused": {"model": {"use_fused_adam": False}},
    "compiled": COMPILED,
    "compiled, activation checkpointing": COMPILED
    | {"training": {"compile": True, "activation_checkpointing": "full"}},
}


def layout_run(
    name: str, options: Options, changes: dict[str, dict[str, Any]], layers: int | None = None
) -> tuple[Config, PreTrainedConfig]:
    """Return the run of a layout of conformance.grid on this machine's devices."""
    config, model_config = settings(name, layers)
    layout = config.distributed
    blocks = layout.cp_size > 1 and layout.cp_engine != "ulysses"  # has no kernel for float64 on GPUs
    data = config.model_dump()
    data["distributed"]["use_cpu"] = not options.on_gpu
    data["model"]["dtype"] = "float32" if blocks else "float64"
    data["training"]["compile"] = False  # unless `changes` say so; null would compile on a GPU
    for section, keys in changes.items():
        data[section] |= keys
    model_config.hidden_size, model_config.head_dim = 64, 8  # kernels on GPUs need a multiple of 8
    return Config.model_validate(data), model_config


def train_on(config: Config, model_config: PreTrainedConfig) -> dict[str, Any]:
    """Train on this rank's GPU. Ranks that communicate through gloo may share it."""
    if not config.distributed.use_cpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    messages = dist.batch_isend_irecv if dist.get_backend() == "nccl" else batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", messages), warnings.catch_warnings():
        warnings.simplefilter("default")  # shown, while the workers of tests raise them
        return train(config, model_config)


@functools.cache
def expected(device: torch.device, layers: int, kv_heads: int, tied: bool, family: str) -> dict[str, Any]:
    """Return the training of transformers in float64, on one process."""
    name = f"dp1 {'tied' if tied else 'untied'} kv{kv_heads} {family}"
    config, model_config = layout_run(name, Options(on_gpu=False), {}, layers)
    return oracle_training(config, model_config, random_tokens(), device=device)


def layout_errors(pool: WorkerPool, options: Options, config: Config, model_config: PreTrainedConfig) -> list[float]:
    reference = expected(
        options.device,
        model_config.num_hidden_layers,
        model_config.num_key_value_heads,
        model_config.tie_word_embeddings,
        model_config.model_type,
    )
    timeout = (ROW - 10) * options.patience
    results = pool.run(train_on, config.distributed.world_size, config, model_config, timeout=timeout)
    return list(largest_errors(results, reference).values())


def layout_checks(options: Options, pools: dict[str, WorkerPool]) -> Iterator[Check]:
    gpus = torch.cuda.device_count() if options.on_gpu else 0

    def one_rank(name: str, text: str = "") -> Check:
        return layout_check(name, text, options, VARIANTS.get(text, {}), pools, "nccl" if options.on_gpu else "gloo")

    def several_ranks(names: list[str]) -> Iterator[Check]:
        for name in names:
            if ranks_of(name) <= gpus:
                yield layout_check(name, "", options, {}, pools, "nccl")
            elif ranks_of(name) <= SHARED:
                yield layout_check(name, "ranks share a device", options, {}, pools, "gloo")

    yield from (one_rank(name) for name in ("dp1 untied kv4 llama", "dp1 tied kv1 llama", "dp1 tied kv8 llama"))
    yield from (one_rank("dp1 tied kv4 llama", text) for text in VARIANTS if "compiled" not in text)
    yield from several_ranks(TWO_RANKS)
    yield from (one_rank("dp1 tied kv4 llama", text) for text in VARIANTS if "compiled" in text and options.compiled)
    yield from several_ranks(LAYOUTS)


def ranks_of(name: str) -> int:
    found = features(name)
    return math.prod(found[axis] for axis in ("dp", "pp", "cp", "tp"))


def layout_check(
    name: str,
    text: str,
    options: Options,
    changes: dict[str, dict[str, Any]],
    pools: dict[str, WorkerPool],
    backend: str,
) -> Check:
    config, model_config = layout_run(name, options, changes)
    limit = LIMITS[getattr(torch, config.model.dtype)]
    cells = [", ".join(filter(None, (name, text))), config.model.dtype, backend]
    return Check(cells, lambda: layout_errors(pools[backend], options, config, model_config), limit, judged=2)


def layouts_section(options: Options) -> Content:
    """Return the section of the report."""
    context = multiprocessing.get_context("spawn") if options.on_gpu else CONTEXT
    pools = {backend: WorkerPool(backend, context) for backend in ("nccl", "gloo")}
    return [
        "Ten steps of a small model in every layout of two ranks, in those of four that [parity.md](parity.md) has, and in",
        "larger ones if there are enough GPUs. If there are not, the ranks share a GPU: their collectives run through gloo, and",
        "their messages through the host's memory. So the table also shows pipelines, rings and ZeRO on the kernels and the",
        "memory of a GPU, though not through NCCL. The reference is transformers on one process, in float64 on one GPU. Ring",
        "attention and its all-gather variant have no kernel for float64 on GPUs, so these layouts run in float32. parity.md",
        "explains the names and the errors. The limit is for losses and gradients: after ten steps of AdamW in float32, weights",
        "differ where gradients are about 0.",
        *header("layout", "dtype", "backend", "loss", "gradients", "weights", "limit", "result"),
        *checked(layout_checks(options, pools), limit=ROW),
    ]
