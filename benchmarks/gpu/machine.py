"""The machine: its GPUs, the versions of the libraries, and the two rates that bound the speed of every kernel."""

import platform

import torch
import transformers
from torch.nn.attention import SDPBackend

from benchmarks.gpu.report import Content, Options, Outcome, Part, header, row, seconds_per_call, table_row
from benchmarks.side_by_side import machine
from picotron.run.metrics import peak_flops

LIMIT = 20.0  # seconds of a part


def device_name(options: Options) -> str:
    if not options.on_gpu:
        return machine()
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(options.device)}; torch {torch.__version__}"


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
        found["memory of a GPU"] = f"{properties.total_memory / 2**30:.1f} GiB"
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def chosen_kernel(device: torch.device) -> str:
    """Return the kernel that torch chooses for the causal attention of SmolLM-1.7B in bfloat16."""
    q = torch.zeros(1, 32, 2048, 64, device=device, dtype=torch.bfloat16)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name


def matmul_rate(device: torch.device, size: int) -> float:
    """Measure the FLOP/s of a product of two random bfloat16 matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_per_call(lambda: a @ b, device)


def copy_rate(device: torch.device, size: int) -> float:
    """Measure the bytes per second, read and written, of a copy within the device's memory."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_call(lambda: target.copy_(source), device)


def machine_section(options: Options) -> Content:
    """Return the section of the report."""
    device = options.device

    def data_sheet() -> list[str]:
        peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16) if options.on_gpu else None
        return [f"{peak / 1e12:.3g} TFLOP/s" if peak else "not known"]

    return [
        device_name(options),
        *header("", "value"),
        Part(["versions"], lambda: Outcome([row(cells) for cells in versions(device).items()]), LIMIT),
        table_row(["kernel that torch chooses for attention in bfloat16"], lambda: [chosen_kernel(device)], LIMIT),
        table_row(
            ["bfloat16 matrix product, measured"],
            lambda: [f"{matmul_rate(device, 8192 if options.on_gpu else 128) / 1e12:.3g} TFLOP/s"],
            LIMIT,
        ),
        table_row(["bfloat16 matrix product, data sheet (basis of MFU)"], data_sheet, LIMIT),
        table_row(
            ["copy in memory, bytes read and written, measured"],
            lambda: [f"{copy_rate(device, 2**31 if options.on_gpu else 2**20) / 1e12:.3g} TB/s"],
            LIMIT,
        ),
    ]
