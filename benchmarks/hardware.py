"""Rates of GPUs for estimates."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates that well-written kernels reach, not those of the data sheet.

    Args:
        name: name of the device, as CUDA reports it.
        products, attention, attention_backward: FLOP/s in bfloat16; attention with heads of 64, causal.
        wide_products: FLOP/s of products in float32.
        memory: bytes/s.
        link: bytes/s that a rank sends to others in the same machine.
        launch: shortest time of a kernel, in seconds.
    """

    name: str
    products: float
    attention: float
    attention_backward: float
    wide_products: float
    memory: float
    link: float
    launch: float = 2e-6


# Assumed, not measured: about three quarters of the data sheets' bfloat16 FLOP/s for products, and 85 % of the
# bandwidth of memory. Attention lies between FlashAttention-2, which reaches 35 % of an H100's FLOP/s, and
# FlashAttention-3, which reaches up to 75 %, according to Shah et al. 2024 (arXiv:2407.08608).
HARDWARE = {
    "H100": Hardware("NVIDIA H100 80GB HBM3", 700e12, 400e12, 330e12, 50e12, 2.85e12, 360e9),
    "H200": Hardware("NVIDIA H200", 720e12, 400e12, 330e12, 50e12, 4.1e12, 360e9),
}
