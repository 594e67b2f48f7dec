"""The machine: its GPUs, the versions of the libraries, and the two rates that bound the speed of every kernel."""

import platform

import torch
import transformers

from benchmarks.side_by_side import machine
from picotron.metrics import peak_flops
from tests.gpu.report import Lines, Options, header, median_seconds, row


def versions(device: torch.device) -> dict[str, str]:
    """Return the names and versions of hardware and software."""
    found = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads of the CPU": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory of a GPU"] = f"{properties.total_memory / 1e9:.1f} GB"
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


REPEATS = 10  # of an operation, between two times


def matmul_rate(device: torch.device, size: int) -> float:
    """Measure the FLOP/s of a product of two random bfloat16 matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return REPEATS * 2 * size**3 / median_seconds(lambda: [a @ b for _ in range(REPEATS)], device)


def copy_rate(device: torch.device, size: int) -> float:
    """Measure the bytes per second, read and written, of a copy within the device's memory."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return REPEATS * 2 * size / median_seconds(lambda: [target.copy_(source) for _ in range(REPEATS)], device)


def machine_section(options: Options) -> Lines:
    """Yield the section of the report."""
    device = options.device
    name, count = (torch.cuda.get_device_name(device), torch.cuda.device_count()) if options.on_gpu else (machine(), 0)
    yield f"{count} x {name}" if options.on_gpu else name
    yield from header("", "value")
    for cells in versions(device).items():
        yield row(cells)
    matmul, copy = (
        matmul_rate(device, 8192 if options.on_gpu else 128),
        copy_rate(device, 2**31 if options.on_gpu else 2**20),
    )
    yield row(["bfloat16 matrix product, measured", f"{matmul / 1e12:.3g} TFLOP/s"])
    peak = peak_flops(name, torch.bfloat16)
    yield row(
        ["bfloat16 matrix product, data sheet (basis of MFU)", f"{peak / 1e12:.3g} TFLOP/s" if peak else "not known"]
    )
    yield row(["copy in memory, bytes read and written, measured", f"{copy / 1e12:.3g} TB/s"])
