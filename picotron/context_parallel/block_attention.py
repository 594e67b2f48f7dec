"""Attention of some queries to some keys, with what it takes to put blocks together: the log-sum-exp of the scores.

PyTorch's fused kernels compute it, and their backwards take any output and log-sum-exp: given those of the attention
to all keys, they compute the gradients of one block of it. The full scores are never in memory.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q to k and v alone.

    Args:
        q: (B, H, T, d); k, v: (B, K, S, d), where H is a multiple of K.
        causal: query i sees keys 0 to i (T = S); else all.

    Returns:
        The output (B, H, T, d) in q's dtype, and the log-sum-exp of the scaled scores (B, H, T), natural, in float32,
        or float64 for float64.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    times = q.size(1) // k.size(1)  # this kernel does not share key/value heads
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse[..., : q.size(2)]  # its length is rounded up


def block_backward(
    dy: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of q, k and v.

    Args:
        dy: the gradient of the attention to all keys (B, H, T, d).
        q, k, v, causal: of the block, as in `block_forward`.
        out, lse: of the attention to all keys.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, lse, 0.0, causal)
    lse = lse.contiguous()  # the kernels do not look at its strides
    # The state of a random generator: there is no dropout.
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, nothing, nothing
        )
    times = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32))
    needed = (True, True, True, False)
    dq, *repeated, _ = aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, None, out, padded, nothing, nothing, 0.0, needed, causal
    )
    dk, dv = (x.unflatten(1, (-1, times)).sum(2) for x in repeated)
    return dq, dk, dv
