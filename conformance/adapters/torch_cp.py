"""Adapter of transformers' models with torch's `context_parallel`, whose attention is a ring.

Words of a layout besides the size:

math             attention from matrix products, instead of CPUs' attention kernel
cpu_kernel       torch's functions for the ring with CPUs' attention kernel, for which `context_parallel` has no rule
alltoall         keys and values travel around the ring instead of being gathered
contiguous       a rank has consecutive tokens, without balancing the work of the causal mask
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as rings
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as private
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from conformance import Case, Result
from conformance.adapters.loop import accumulate, train
from conformance.case import Batch

AXES = ("cp",)
CHAPTERS = ("step", "steps", "accumulation", "odd", "tied", "masks", "weights", "loss", "float32")
LAYOUTS = (
    "cp2 math contiguous",
    "cp2 cpu_kernel",
    "cp2 cpu_kernel alltoall",
    "cp2 cpu_kernel contiguous",
    "cp4 cpu_kernel",
)
FORWARD: Any = private._templated_ring_attention
BACKWARD: Any = private._templated_ring_attention_backward
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """forward, backward: torch's functions for the ring, with CPUs' attention kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = FORWARD(dist.group.WORLD, 2, KERNEL, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = BACKWARD(
            *(dist.group.WORLD, 2, KERNEL_BACKWARD, gradients[0], "grad_out", *ctx.saved_tensors),
            is_causal=True,
            dropout_p=0.0,
        )
        return grads[:3]


def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> tuple[Tensor, None]:
    """Compute causal attention for transformers' layers: (B, H, T/cp, head_dim) -> (B, T/cp, H, head_dim)."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    out: Tensor = Ring.apply(q, k, v) if options["ring"] else F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2), None


AttentionInterface.register("causal", attention)


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model: Any = case.model()
    model.set_attn_implementation("causal")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rings.set_rotate_method("alltoall" if "alltoall" in case.words else "allgather")
    private._cp_options.enable_load_balance = "contiguous" not in case.words
    private._cp_options.convert_to_f32 = case.dtype != "float64"
    backend = sdpa_kernel(SDPBackend.MATH) if "math" in case.words else contextlib.nullcontext()

    def logits_of(piece: Batch) -> Tensor:
        inputs = {name: piece[name] for name in ("input_ids", "position_ids")}
        logits: Tensor = model(**inputs, use_cache=False, ring="cpu_kernel" in case.words).logits
        return logits

    def backward(batch: Batch, total: Tensor) -> float:
        own = {name: tensor.clone() for name, tensor in batch.items()}
        buffers = list(own.values())  # which `context_parallel` splits in place
        with (
            backend,
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(own), no_restore_buffers=set(buffers)),
        ):
            loss = accumulate(case, own, total, logits_of)
        dist.all_reduce(loss)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        return float(loss)

    return train(case, dict(model.named_parameters()), backward)
