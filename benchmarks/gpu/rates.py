"""Rates of the operations that take the time of a step, beside the rates that hardware.py assumes."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.report import Content, Options, Part, header, seconds_per_call, synchronize, table_row
from benchmarks.gpu.speed import Workload, free_memory, random_weights, workloads
from picotron.config import Training
from picotron.model.cross_entropy import VocabularyShard, chunk_loss, linear_cross_entropy
from picotron.model.placement import set_main_grad
from picotron.optimizer.optimizer import AdamW
from picotron.parallelize import build_model
from picotron.process_group_manager import setup_process_group_manager
from workbench.explain.hardware import Hardware
from workbench.generation.rotation import generate
from workbench.generation.sampling import Sampling
from workbench.pipelines.engine import plan_pipeline

LIMIT, COMPILATION = 30.0, 60.0  # seconds of a row
BF16 = torch.bfloat16
TOKENS = 8192  # of a product or of a loss
CUDNN, FLASH, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
# Rows, query heads, key/value heads, tokens, head size: of SmolLM-1.7B, of Llama-3.2-1B, and of larger models.
ATTENTION = [(4, 32, 32, 2048, 64), (2, 32, 8, 4096, 64), (2, 16, 16, 4096, 128)]
COLUMNS = range(1025, 1049)  # of a cache, while 24 tokens are generated


class Rate(NamedTuple):
    """What an operation takes and does.

    Args:
        seconds: its measured time.
        work, unit: its FLOPs or its bytes, and the name of the rate.
        assumed: the time that a step with these rates is estimated to spend on it.
    """

    seconds: float
    work: float
    unit: str
    assumed: Callable[[Hardware], float]


def flops(seconds: float, work: float, assumed: Callable[[Hardware], float]) -> Rate:
    return Rate(seconds, work, "TFLOP/s", assumed)


def moved(seconds: float, work: float) -> Rate:
    return Rate(seconds, work, "TB/s", lambda hardware: hardware.move(work))


def random(options: Options, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=options.device).to(dtype)


def product(options: Options, tokens: int, inputs: int, outputs: int, which: str) -> Rate:
    """Measure a product of a linear layer, on memory ordered as in the layer."""
    x, weight, dy = (random(options, *shape) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
    run = {"forward": lambda: F.linear(x, weight), "dx": lambda: dy @ weight, "dW": lambda: dy.t() @ x}[which]
    work, numbers = 2 * tokens * inputs * outputs, x.numel() + weight.numel() + dy.numel()
    seconds = seconds_per_call(run, options.device)
    return flops(seconds, work, lambda hardware: hardware.product("bfloat16", work, 2 * numbers))


def attention(options: Options, backend: SDPBackend, sizes: tuple[int, ...], backward: bool) -> Rate:
    """Measure causal attention with one kernel. Its FLOPs are those that the mask leaves."""
    rows, heads, kv_heads, tokens, size = sizes
    q, k, v, dy = (
        random(options, rows, tokens, count, size).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads, heads)
    )

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads > kv_heads)

    with sdpa_kernel(backend):
        y = forward()
        run: Callable[[], Any] = functools.partial(torch.autograd.grad, y, (q, k, v), dy, retain_graph=True)
        seconds = seconds_per_call(run if backward else forward, options.device)
    work = (5 if backward else 2) * rows * heads * tokens**2 * size
    return flops(seconds, work, lambda hardware: hardware.attend("bfloat16", work, backward))


def loss(options: Options, tokens: int, hidden: int, vocabulary: int, kind: str) -> Rate:
    """Measure head and loss, forward and backward. The work and the assumed time are those of the three products."""
    x, weight = (random(options, *shape).requires_grad_() for shape in ((1, tokens, hidden), (vocabulary, hidden)))
    targets = torch.randint(vocabulary, (1, tokens), device=options.device)
    shard = VocabularyShard(0, vocabulary, setup_process_group_manager(1, 1, 1, 1).tp_group)

    def torchs() -> Tensor:
        return F.cross_entropy((x @ weight.t()).flatten(0, 1).float(), targets.flatten())

    def ours() -> Tensor:
        return linear_cross_entropy(x, weight, targets, shard, compute_chunk=loss_fn)

    compiled = kind.endswith("compiled")
    loss_fn = torch.compile(chunk_loss) if compiled else chunk_loss
    whole = torch.compile(torchs) if compiled else torchs
    function = ours if kind.startswith("picotron") else whole
    seconds = seconds_per_call(lambda: torch.autograd.grad(function(), (x, weight)), options.device)
    work, numbers = 6 * tokens * hidden * vocabulary, x.numel() + weight.numel() + tokens * vocabulary
    return flops(seconds, work, lambda hardware: hardware.product("bfloat16", work, 6 * numbers))


def accumulation(options: Options, numbers: int) -> Rate:
    total, gradient = random(options, numbers, dtype=torch.float32), random(options, numbers)
    return moved(seconds_per_call(lambda: total.add_(gradient), options.device), 10 * numbers)


def optimizer(options: Options, numbers: int) -> Rate:
    """Measure the fused AdamW. It reads four float32 numbers of each parameter, writes three, and copies one."""
    parameters = [nn.Parameter(random(options, numbers // 16)) for _ in range(16)]
    for parameter in parameters:
        set_main_grad(parameter, random(options, numbers // 16, dtype=torch.float32))
    adamw = AdamW(nn.ParameterList(parameters), Training(), fused=True)
    return moved(seconds_per_call(adamw.step, options.device), (28 + 6) * numbers)


def decoding(options: Options, backends: list[SDPBackend], heads: int) -> Rate:
    """Measure attention of one token per sequence to a cache that grows, so to shapes that no call had before."""
    kv = random(options, 2, 8, heads, max(COLUMNS), 64)
    q = random(options, 8, heads, 1, 64)

    def attend(columns: int) -> Tensor:
        return F.scaled_dot_product_attention(q, kv[0, :, :, :columns], kv[1, :, :, :columns])

    with sdpa_kernel(backends):
        attend(COLUMNS[0] - 1)  # loads the kernels
        synchronize(options.device)
        start = time.perf_counter()
        for columns in COLUMNS:
            attend(columns)
        synchronize(options.device)
        seconds = (time.perf_counter() - start) / len(COLUMNS)
    return moved(seconds, 2 * kv.numel())


def generation(workload: Workload, prompts: int, tokens: int) -> Rate:
    """Measure the tokens/s of `generate` after prompts of 128 tokens. Each round reads all weights."""
    setup_process_group_manager(1, 1, 1, 1)
    config, device = workload.config(), workload.device
    free_memory(device)
    plan = plan_pipeline(config, workload.model)
    stage = build_model(config, workload.model, plan.wrap, device, BF16, random_weights(device)).module
    ids = torch.randint(workload.model.vocab_size, (prompts, 128)).tolist()
    generate(stage, ids, Sampling(2, 0.0))
    start = time.perf_counter()
    generate(stage, ids, Sampling(tokens, 0.0))
    seconds = time.perf_counter() - start
    return moved(seconds / tokens, sum(each.nbytes for each in stage.parameters()))


def rates(options: Options) -> Iterator[Part]:
    """Yield the rows."""

    def rate(name: str, size: str, run: Callable[[], Rate], rounds: int = 0, limit: float = LIMIT) -> Part:
        def cells() -> list[str]:
            seconds, work, unit, assumed_by = run()
            assumed = assumed_by(options.hardware) if options.hardware else math.nan
            time = f"{1e3 * seconds:.3f}" + (f" ({rounds / seconds:,.0f} tokens/s)" if rounds else "")
            rates = [f"{work / each / 1e12:.3g} {unit}" for each in (seconds, assumed)]
            return [time, *rates, f"{assumed / seconds:.2g}"]

        return table_row([name, size], cells, limit)

    on_gpu = options.on_gpu
    tokens, hidden, numbers = (TOKENS, 2048, 2**28) if on_gpu else (64, 32, 2**12)
    outputs = [2048, 512, 8192, 49152, 128256] if on_gpu else [32, 64]
    shapes = [(hidden, each) for each in outputs] + [(outputs[2] if on_gpu else 64, hidden)]
    for (inputs, out), which in ((shape, which) for shape in shapes for which in ("forward", "dx", "dW")):
        run = functools.partial(product, options, tokens, inputs, out, which)
        yield rate(f"product, {which}", f"{tokens} x {inputs} -> {out}", run)
    for sizes in ATTENTION if on_gpu else [(1, 4, 2, 16, 8)]:
        # The memory-efficient kernel has no groups of heads.
        kernels = [CUDNN, FLASH] + [EFFICIENT] * (sizes[1] == sizes[2]) if on_gpu else [SDPBackend.MATH]
        for backward, backend in ((backward, backend) for backward in (False, True) for backend in kernels):
            direction = "backward" if backward else "forward"
            size = "{} rows, {} / {} heads, {} tokens, head size {}".format(*sizes)
            run = functools.partial(attention, options, backend, sizes, backward)
            yield rate(f"attention, {direction}, {backend.name.removesuffix('_ATTENTION')}", size, run)
    for vocabulary in (49152, 128256) if on_gpu else (61,):
        for which in ["picotron", "torch"] + ["picotron, compiled", "torch, compiled"] * options.compiled:
            run = functools.partial(loss, options, tokens, hidden, vocabulary, which)
            size, limit = f"{tokens} x {hidden} -> {vocabulary}", COMPILATION if "compiled" in which else LIMIT
            yield rate(f"head and loss, {which}", size, run, limit=limit)
    yield rate("`add_`, float32 += bfloat16", f"{numbers:,}", functools.partial(accumulation, options, numbers))
    yield rate("`AdamW`, fused", f"{numbers:,}", functools.partial(optimizer, options, numbers))
    heads, others = 32 if on_gpu else 1, [FLASH, EFFICIENT, SDPBackend.MATH]
    for name, backends in {"without cuDNN": others, "cuDNN": [CUDNN]}.items() if on_gpu else {"CPU": others}.items():
        run = functools.partial(decoding, options, backends, heads)
        yield rate(f"attention to a growing cache, {name}", f"8 rows, {heads} heads, {COLUMNS[0]} columns", run)
    workload, (prompts, new) = workloads(options)[0], ((8, 64) if on_gpu else (2, 4))
    run = functools.partial(generation, workload, prompts, new)
    yield rate(f"generation, {workload.name}", f"{prompts} prompts of 128 tokens, {new} more", run, prompts)


def rates_section(options: Options) -> Content:
    """Return the section of the report."""
    return [
        "What single operations reach in bfloat16, and the rates that [hardware.py](../../workbench/explain/hardware.py) assumes for them.",
        "Forecasts and priced steps are computed from the assumed rates, so the last column shows which of them to correct. A",
        "loss is far below the rate of products, because it also moves the logits; generation reads all weights for each token.",
        *header("operation", "size", "ms", "measured", "assumed", "measured / assumed"),
        *rates(options),
    ]
