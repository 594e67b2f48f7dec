"""Devices as data: the rates from which `step_time.forecast` computes times.

    HARDWARE["H100"]            an entry of the table below
    read_hardware("mine.json")  a JSON object with the same fields, which may begin with `"like": "H100"`

Rates are those that well-written programs reach, not those of data sheets. No torch here.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from picotron.console import UserError
from workbench.console import invalid_value
from workbench.files import read_object
from workbench.run.metrics import PEAK_BF16_FLOPS

# Fraction of a device's memory that a plan may need. The rest is for what the estimate leaves out: the CUDA context,
# the buffers of NCCL and cuBLAS, and gaps between tensors.
USABLE = 0.92

PARTS = 16  # at most, into which a product divides each tile if the tiles are too few for all processors


Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


def fits(needed: float, gib: float) -> bool:
    """Return whether `needed` GiB fit into a device with `gib` GiB."""
    return needed <= USABLE * gib


def usable(gib: float) -> str:
    """Return the name of the memory that `fits` compares with, such as `92 % of 80 GiB`."""
    return f"{USABLE:.0%} of {gib:.4g} GiB".replace("%", " %")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one device, and of the links between devices.

    Args:
        name: name of the device, as CUDA reports it.
        peak: FLOP/s in bfloat16 according to the data sheet; 0 if there is none, and so no MFU.
        gib: memory in GiB.
        products: FLOP/s of large matrix products, by dtype.
        attention, attention_backward: FLOP/s of fused causal attention, as a fraction of those of products.
        memory: bytes/s of element-wise operations, read and written.
        link: bytes/s that a rank sends to another rank of the same node.
        network: bytes/s that a rank sends to another node.
        processors: number of streaming multiprocessors, each of which computes a tile of a product at a time; null if
            the rate of products does not depend on their shape.
        collective_launch: seconds in which a collective or a message starts.
        latency, network_latency: seconds of each of its steps, in a node and between nodes.
        node: number of ranks in a node.
        layer_launch: seconds in which Python starts the operations of a layer's forward.
        step_launch: seconds of a step that depend on nothing: data, loop over the parameters, wait for the loss.
        step_wait: seconds in which several ranks wait for the slowest one in a step, apart from their messages.
        contention: fraction of the time of messages over tp, and of ZeRO-3's, by which computations that hide them take
            longer, because both need the memory and the processors of the device.
        pace: fraction of the rate of products in a step of several ranks, of which the slowest one sets the pace.
        cores: number of ranks that compute at the same time; null if every rank has a separate device. Then the device
            also computes while Python starts further operations, and while messages are on their way.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # of files

    name: str
    peak: NonNegative
    gib: Positive
    products: Annotated[dict[str, Positive], Field(min_length=1)]
    attention: Positive
    attention_backward: Positive
    memory: Positive
    link: Positive
    network: Positive
    processors: Count | None = None
    collective_launch: NonNegative = 8.4e-6
    latency: NonNegative = 3.4e-6
    network_latency: NonNegative = 9.6e-6
    node: Count = 8
    layer_launch: NonNegative = 0.4e-3
    step_launch: NonNegative = 0.008
    step_wait: NonNegative = 0.052
    contention: NonNegative = 0.4
    pace: Positive = 1.0
    cores: Count | None = None

    def in_step(self, ranks: int) -> "Hardware":
        """Return the rates in a step of this number of ranks, see `pace`."""
        pace = self.pace if ranks > 1 else 1.0
        return dataclasses.replace(self, products={dtype: pace * rate for dtype, rate in self.products.items()})

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of products in a dtype. Raises a UserError if there is none."""
        dtype = "bfloat16" if dtype == "float16" else dtype  # GPUs that have both are equally fast
        if dtype not in self.products:
            raise UserError(
                f"{self.name} has no rate of products in {dtype}, only in {', '.join(self.products)}; use another "
                f"model.dtype, or a JSON file of hardware that has it"
            )
        return self.products[dtype]

    def product(self, dtype: str, flops: float, moved: float) -> float:
        """Return the seconds of a matrix product, by a roofline (Williams et al. 2009).

        Args:
            flops: FLOPs of the product, times `waves`.
            moved: bytes of both factors and of the result.
        """
        return max(flops / self.rate(dtype), self.move(moved))

    def waves(self, rows: int, columns: int) -> float:
        """Return how many times longer a product takes than if its result filled all processors until the end.

        A result of (rows x columns) numbers is computed in tiles, as many at a time as there are processors, and the
        last wave of tiles may leave most of them idle (NVIDIA, Matrix Multiplication Background User's Guide, tile and
        wave quantization). Tiles have 128 x 128 numbers; larger ones are faster, but leave more idle.
        """
        if self.processors is None:
            return 1.0
        tiles = -(-rows // 128) * -(-columns // 128)
        parts = PARTS if tiles < self.processors else 1
        waves = min(-(-tiles * n // self.processors) / n for n in range(1, parts + 1))
        return waves * self.processors * 128**2 / (rows * columns)

    def attend(self, dtype: str, flops: float, backward: bool = False) -> float:
        """Return the seconds of fused causal attention."""
        return flops / self.rate(dtype) / (self.attention_backward if backward else self.attention)

    def move(self, moved: float) -> float:
        """Return the seconds to read and write `moved` bytes in total."""
        return moved / self.memory

    def step(self, ranks: int) -> float:
        """Return the seconds of a step that depend on nothing but the number of ranks."""
        return self.step_launch + (self.step_wait if ranks > 1 else 0.0)

    def collective(self, ranks: int, in_node: int, count: float, steps: int, sent: float) -> float:
        """Return the seconds of collectives or messages. Of the steps of a ring, only those cross the network that lead
        to another node.

        Args:
            ranks: number of ranks in the group.
            in_node: number of them that share a node. If others are elsewhere, each of these sends a part of the bytes
                that leave the node through its own network card.
            count: number of collectives.
            steps: number of steps of the ring, in each of them.
            sent: bytes that a rank sends, in all collectives together.
        """
        if ranks == 1:
            return 0.0
        between = steps * (ranks / in_node - 1) / (ranks - 1)
        each = self.collective_launch + (steps - between) * self.latency + between * self.network_latency
        rate = self.link if in_node == ranks else min(self.link, in_node * self.network)
        return count * each + sent / rate


# Fractions of a data sheet's bfloat16 FLOP/s that torch's products of large random matrices reach on one GPU. H100 and
# RTX 4090: zzc0721/torch-performance-test-data, issues 79 and 78, the largest size; L40S: database.md there, the best
# size; A100: He 2024, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data". Most GPUs
# slow down at their limit of power; a GeForce's clock is higher than in its data sheet. The H200 has an H100's chip.
PRODUCTS_REACHED = {"H100": 0.73, "H200": 0.73, "A100": 0.83, "L40S": 0.74, "RTX 4090": 0.96}
PACE = {"H100": 0.88, "H200": 0.88, "A100": 0.92}  # calibrated, see `gpu`, as is the fraction of a network card's rate
NETWORK_REACHED = {"H100": 0.75, "H200": 0.75}  # of a card with 400 Gb/s; of others 0.6


def gpu(
    name: str, device: str, gib: float, processors: int, wide: float, double: float, memory: float, link: float,
    network: float,
) -> Hardware:  # fmt: skip
    """Return the rates of a GPU: its data sheet, times the fractions that programs reach.

    `pace`, the fraction of the network, and the sum of `step_launch` and `step_wait`, 0.06 s, are calibrated: they are
    those with which `benchmarks.forecast` agrees best with the published runs that it lists as used for calibration.
    All these runs, even those of two GPUs, have several ranks. What one rank needs of this sum, `step_launch`, is an
    assumption; forecasts of one H100 that `make gpu` has measured are 2 % and 7 % too fast. `contention` is calibrated
    with the runs of ZeRO-3, and holds for tensor parallelism, too. The other prices are from these sources:

        memory      0.85: what a triad reaches on an A100 (BabelStream's results, Deakin et al. 2018)
        link        0.78: bus bandwidth that NVIDIA's nccl-tests print for large all-reduces on an H100, 350 of 450 GB/s
        attention   0.55 and 0.45 of products: between FlashAttention-2, which reaches 35 % of an H100's peak, and
                    FlashAttention-3, which reaches up to 75 % (Shah et al. 2024, arXiv:2407.08608)
        latencies   the model with which NCCL chooses algorithms (src/graph/tuning.cc, commit 01afd20): for a ring with
                    the protocol "simple", 8.4 us to start, and 3.4 us (NVLink) or 9.6 us (network) for each step

    Args:
        name: key of PEAK_BF16_FLOPS.
        device: name of the device, as CUDA reports it.
        processors: number of streaming multiprocessors.
        wide, double: peak FLOP/s in float32 and in float64.
        memory, link, network: peak bytes/s.
    """
    peak = PEAK_BF16_FLOPS[name]
    return Hardware(
        name=device,
        peak=peak,
        gib=gib,
        products={"bfloat16": PRODUCTS_REACHED[name] * peak, "float32": 0.75 * wide, "float64": 0.75 * double},
        attention=0.55,
        attention_backward=0.45,
        memory=0.85 * memory,
        link=0.78 * link,
        network=NETWORK_REACHED.get(name, 0.6) * network,
        processors=processors,
        pace=PACE.get(name, 0.9),
    )


# Data sheets: NVIDIA H100 (SXM5, 80 GB), H200 (SXM), A100 (SXM4, 80 GB), L40S; NVIDIA Ada GPU architecture whitepaper
# (RTX 4090). NVLink's rates are half of those in the data sheets, which add both directions; PCIe 4.0 x16 has 32 GB/s.
# Networks are those of NVIDIA's own systems: one InfiniBand card per GPU, 400 Gb/s in DGX H100 and H200, 200 Gb/s in
# DGX A100. For the last two, which come in no such system, 100 Gb/s per GPU are assumed. GiB are those that CUDA
# reports.
HARDWARE = {
    "H100": gpu("H100", "NVIDIA H100 80GB HBM3", 79.1, 132, 67e12, 67e12, 3.35e12, 450e9, 50e9),
    "H200": gpu("H200", "NVIDIA H200", 139.8, 132, 67e12, 67e12, 4.8e12, 450e9, 50e9),
    "A100": gpu("A100", "NVIDIA A100-SXM4-80GB", 79.1, 108, 19.5e12, 19.5e12, 2.039e12, 300e9, 25e9),
    "L40S": gpu("L40S", "NVIDIA L40S", 44.4, 142, 91.6e12, 1.43e12, 0.864e12, 32e9, 12.5e9),
    "RTX4090": gpu("RTX 4090", "NVIDIA GeForce RTX 4090", 23.5, 128, 82.6e12, 1.29e12, 1.008e12, 32e9, 12.5e9),
}


def read_hardware(path: Path) -> Hardware:
    """Read hardware from a JSON file. With the key `like`, missing fields are those of this entry of HARDWARE.

    Raises:
        UserError: the file cannot be read, or its fields or their values are not those of `Hardware`.
    """
    data = read_object(path)
    like = data.pop("like", None)
    if like is not None:
        if not isinstance(like, str) or like not in HARDWARE:
            raise UserError(f"{path}: like={json.dumps(like)} is none of {', '.join(HARDWARE)}")
        data = dataclasses.asdict(HARDWARE[like]) | data
    try:
        return TypeAdapter(Hardware).validate_json(json.dumps(data))
    except ValidationError as error:
        raise UserError(*(f"{path}: {_sentence(each)}" for each in error.errors())) from None


def _sentence(error: ErrorDetails) -> str:
    if error["type"] == "unexpected_keyword_argument":
        keys = ", ".join(field.name for field in dataclasses.fields(Hardware))
        return f"unknown key {error['loc'][0]!r}; the keys are like, {keys}"
    if error["type"] == "missing":
        return f'{error["loc"][0]!r} is missing; add it, or name similar hardware, as in "like": "H100"'
    return f"{invalid_value(error)}; see Hardware in workbench/explain/hardware.py"
