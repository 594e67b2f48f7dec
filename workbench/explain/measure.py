"""Measure the rates of this machine's devices, in about ten seconds: `--hardware this`.

One rank per device, or per OMP_NUM_THREADS cores of the CPU, measures at the same time as all others, so that they
share the memory as in a run.
"""

import dataclasses
import functools
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig

from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.model.llama import DecoderLayer, fused_attention
from workbench.explain.hardware import HARDWARE, Hardware, read_hardware
from workbench.prepare.cache import cached
from workbench.run.launch import init_process_group, set_up_device
from workbench.run.metrics import peak_flops
from workbench.run.ranks import run_ranks
from workbench.run.with_keys import with_keys

SECONDS = 0.6  # for each rate
FILE = "hardware.json"  # in the cache


def find_hardware(name: str, config: Config) -> Hardware:
    """Return an entry of HARDWARE, this machine's rates, which are measured once and cached, or those of a JSON file.

    Raises:
        UserError: there is no such hardware.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if name != "this":
        if not name.endswith(".json"):
            raise UserError(f"--hardware {name} is none of {', '.join(HARDWARE)}, this, or a file that ends in .json")
        return read_hardware(Path(name))
    if not config.distributed.use_cpu and not torch.cuda.is_available():
        raise UserError(
            "--hardware this: this machine has no CUDA device; add --distributed.use_cpu true, or name a GPU, as in --hardware H100"
        )
    device = "cpu" if config.distributed.use_cpu else "cuda"
    threads = config.environment.OMP_NUM_THREADS
    ranks = torch.cuda.device_count() if device == "cuda" else max(1, cores() // threads)
    key = f"{device_name(device)} {ranks} {threads} {torch.__version__} {Path(__file__).read_text()}"
    sizes = {"dp_size": ranks, "pp_size": 1, "cp_size": 1, "tp_size": 1, "backend": None}
    config = with_keys(config, distributed=sizes)

    def write(folder: Path) -> None:
        print(f"measuring this machine's rates with {ranks} processes; they are cached", file=sys.stderr)
        run_ranks(ranks, functools.partial(measure_on_rank, config, folder / FILE))

    return read_hardware(cached("hardware", key, write) / FILE)


def on_hardware(config: Config, hardware: Hardware) -> Config:
    """Return a config that trains on this hardware: on its GPU, or on its cores."""
    return with_keys(config, distributed={"use_cpu": hardware.cores is not None})


def cores() -> int:
    """Return the number of cores that this process may use, where the system tells, or that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: str) -> str:
    """Return the name of this machine's "cuda" device or "cpu"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor() or "CPU"
    )


def measure_on_rank(config: Config, file: Path) -> None:
    """Measure on a rank of `run_ranks`. Rank 0 writes the rates to a file."""
    device = set_up_device(config)
    init_process_group(config, device)
    hardware = measure(device)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(dataclasses.asdict(hardware), indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def seconds(function: Callable[[], object], device: torch.device, repeats: int | None = None) -> float:
    """Return the median time of a call, after one that does not count.

    Args:
        repeats: number of calls, which collectives need; None repeats as often as the time allows.
    """

    def once() -> float:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    times, end = [once() for _ in range(repeats or 3)], time.perf_counter() + SECONDS
    while repeats is None and time.perf_counter() < end:
        times.append(once())
    return median(times)


def measure(device: torch.device) -> Hardware:
    """Measure the rates of this process's device. All processes must call this."""
    on_gpu, ranks = device.type == "cuda", dist.get_world_size()
    size, dtype = (8192, torch.bfloat16) if on_gpu else (768, torch.float32)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    products = {}
    for each in (torch.bfloat16, torch.float32, torch.float64):  # a linear layer and its two gradients
        x, weight, dy = (random(size, size, dtype=each).requires_grad_() for _ in range(3))

        def linear(x: torch.Tensor = x, weight: torch.Tensor = weight, dy: torch.Tensor = dy) -> None:
            torch.autograd.grad(F.linear(x, weight), (x, weight), dy)

        products[str(each).removeprefix("torch.")] = 6 * size**3 / seconds(linear, device)
    rate = products[str(dtype).removeprefix("torch.")]

    T = size
    q, k, v = (random(1, 8, T, 64).requires_grad_() for _ in range(3))
    flops = 2 * T * T * 8 * 64
    forward = seconds(lambda: fused_attention(q, k, v), device)
    y = fused_attention(q, k, v)
    backward = seconds(lambda: torch.autograd.grad(y, (q, k, v), y, retain_graph=True), device)

    # On a CPU, several tensors in turn, because one stays in its cache.
    pairs = itertools.cycle([(random(4 * size, size), random(4 * size, size)) for _ in range(1 if on_gpu else 8)])

    def silu() -> torch.Tensor:
        gate, up = next(pairs)
        return F.silu(gate) * up

    memory = 5 * 4 * size**2 * dtype.itemsize / seconds(silu, device)

    tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1)
    layer = DecoderLayer(tiny).to(device, dtype)
    x, cos = random(1, 8, 8), random(1, 8, 1, 4)
    launch = seconds(lambda: layer(x, cos, cos), device)

    buffer, number = random(2**28 if on_gpu else 2**21), random(1)
    link, latency = memory, 0.0
    if ranks > 1:
        latency = seconds(lambda: all_reduce(number, None), device, 200) / (2 * (ranks - 1))
        link = 2 * (ranks - 1) / ranks * buffer.nbytes / seconds(lambda: all_reduce(buffer, None), device, 20)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    if on_gpu:
        total = torch.cuda.get_device_properties(device).total_memory
    return Hardware(
        name=device_name(device.type),
        peak=(peak_flops(device_name(device.type), torch.bfloat16) or 0.0) if on_gpu else 0.0,
        gib=total / 2**30,
        products=products,
        attention=flops / forward / rate,
        attention_backward=2.5 * flops / backward / rate,
        memory=memory,
        link=link,
        network=link,
        collective_launch=0.0,
        latency=latency,
        network_latency=latency,
        node=2**20,
        layer_launch=launch,
        step_launch=HARDWARE["H100"].step_launch if on_gpu else 0.0,
        step_wait=HARDWARE["H100"].step_wait if on_gpu else 0.0,
        cores=None if on_gpu else ranks,
    )
