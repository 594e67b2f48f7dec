"""Attention to one block of keys, and the log-sum-exp of its scores, with which the results of blocks are merged.

PyTorch's fused kernels return the log-sum-exp, and their backwards accept any output and log-sum-exp: given those of
the attention to all keys, they compute one block's contribution to the gradients. So the full matrix of scores is never
in memory.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether torch would choose cuDNN's kernel, as it does in half precision on Hopper GPUs.

    Its backward returned NaN for numbers of keys that leave a part of a tile of 128 (pytorch/pytorch#196678).
    """
    if not q.is_cuda or k.size(2) % 128:
        return False
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=q.size(1) != k.size(1))
    return choice == SDPBackend.CUDNN_ATTENTION.value


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool = False) -> tuple[Tensor, Tensor]:
    """Compute attention of the queries q to one block of keys k and values v.

    Args:
        q: (B, H, T, d).
        k, v: (B, K, S, d) for S keys, where H is a multiple of K.
        causal: whether query i attends to keys 0 to i only, which requires S = T, instead of to all keys.
        new_shape: whether other micro-batches have other T and S. cuDNN would then spend most of the time on building
            plans, one for each shape, which it never forgets.

    Returns:
        The output (B, H, T, d) in q's dtype, and the natural log-sum-exp of the scaled scores (B, H, T) in float32,
        or in float64 for float64 inputs.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if not new_shape and prefers_cudnn(q, k, v, causal):
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse.squeeze(-1)
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    queries_per_kv = q.size(1) // k.size(1)  # this kernel needs a key/value head for each query head
    k, v = (x.repeat_interleave(queries_per_kv, dim=1) for x in (k, v))
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse[..., : q.size(2)]  # the kernel pads lse


def block_backward(
    dy: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one block's contribution to the gradients of q, k and v.

    Args:
        dy: gradient of the output of the attention to all keys, (B, H, T, d).
        q, k, v, causal, new_shape: those of the block, as in `block_forward`.
        out, lse: output and log-sum-exp of the attention to all keys.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, lse, 0.0, causal)
    lse = lse.contiguous()  # the kernels ignore its strides
    random_state = torch.zeros((), dtype=torch.int64, device=q.device)  # unused: there is no dropout
    if not new_shape and prefers_cudnn(q, k, v, causal):
        return aten._scaled_dot_product_cudnn_attention_backward(
            dy,
            q,
            k,
            v,
            out,
            lse[..., None],
            random_state,
            random_state,
            None,
            None,
            None,
            q.size(2),
            k.size(2),
            0.0,
            causal,
        )
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, random_state, random_state
        )
    queries_per_kv = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(queries_per_kv, dim=1) for x in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32))
    needed = (True, True, True, False)
    dq, *repeated, _ = aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, None, out, padded, random_state, random_state, 0.0, needed, causal
    )
    dk, dv = (x.unflatten(1, (-1, queries_per_kv)).sum(2) for x in repeated)
    return dq, dk, dv
