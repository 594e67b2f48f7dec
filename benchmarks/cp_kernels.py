"""Do the kernels of context parallelism compute attention? One process plays all cp ranks, without messages:

    python -m benchmarks.cp_kernels

Outputs and gradients are compared with attention in float64, beside the errors of torch's own fused attention to the
whole sequence: on a GPU with each kernel by name, on the CPU with its only one.
"""

import argparse
import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workload import ON_GPU, TINY, add_tiny
from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype
from picotron.context_parallel import block_attention
from picotron.context_parallel.context_parallel import local_positions, visible_blocks
from workbench.console import print_line
from workbench.variants.packed import math_attention

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if ON_GPU else (torch.float32, torch.bfloat16)
SHAPES = ((2, 8, 8, 1024, 64), (1, 8, 2, 2048, 128), (1, 4, 1, 768, 128), (2, 4, 4, 1000, 64), (1, 8, 8, 1536, 80))
SHAPES = ((1, 4, 2, 64, 16),) if TINY else SHAPES  # B, H, K, T, d
KERNELS: dict[str, bool | None] = {"chosen": None, "cuDNN": True, "flash": False} if ON_GPU else {"CPU": None}
LIMIT = 1.5  # times the error of torch's attention


def gradients_of(attend: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the output of an attention function, and the gradients of its three inputs."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    y = attend(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def in_blocks(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, cp: int, sharding: str) -> list[Tensor]:
    """Return output and gradients of attention as cp ranks compute them, one after the other."""
    places = [local_positions(q.size(2), cp, rank, sharding).to(q.device) for rank in range(cp)]
    wide, outs, dqs = accumulation_dtype(q), list[Tensor](), list[Tensor]()
    kv = [torch.stack((k[:, :, place], v[:, :, place])) for place in places]
    dkv = [torch.zeros_like(each, dtype=wide) for each in kv]
    blocks_of = functools.partial(visible_blocks, sharding=sharding)
    for rank, place in enumerate(places):
        with mock.patch.object(pgm, "process_group_manager", types.SimpleNamespace(cp_rank=rank, cp_world_size=cp)):
            order, own = [(rank - step) % cp for step in range(cp)], q[:, :, place]
            out, lse = block_attention.blockwise_attention(own, ((source, kv[source]) for source in order), blocks_of)
            outs.append(out)
            dqs.append(torch.zeros_like(own, dtype=wide))
            for source in order:
                blocks = blocks_of(source, own.size(2))
                gradients = dqs[rank], dkv[source]
                block_attention.accumulate_gradients(dy[:, :, place], own, kv[source], blocks, out, lse, *gradients)
    inverse = torch.cat(places).argsort()
    joined = torch.cat(outs, 2), torch.cat(dqs, 2), *torch.cat(dkv, 3)
    return [each[:, :, inverse].to(q.dtype) for each in joined]


def kernel(prefers_cudnn: bool | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which cuDNN's kernel is used, or is not; None: as the trainer chooses."""
    if prefers_cudnn is None:
        return contextlib.nullcontext()
    return mock.patch.object(block_attention, "prefers_cudnn", return_value=prefers_cudnn)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the relative error of each tensor."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tiny(parser)
    parser.parse_args()
    wrong = 0
    for dtype, shape, cp, sharding in itertools.product(DTYPES, SHAPES, (2, 4), ("zigzag", "contiguous")):
        B, H, K, T, d = shape
        generator = torch.Generator().manual_seed(0)
        q, k, v, dy = (torch.randn(B, heads, T, d, generator=generator).to(DEVICE, dtype) for heads in (H, K, K, H))
        exact = gradients_of(math_attention, dy.double(), q.double(), k.double(), v.double())
        fused = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=K != H)
        theirs = errors(gradients_of(fused, dy, q, k, v), exact)
        for name, prefers_cudnn in KERNELS.items():
            if prefers_cudnn and (dtype == torch.float32 or T // cp // 2 % 128):
                continue  # for which cuDNN has no kernel, or is not chosen
            with kernel(prefers_cudnn):
                ours = errors(in_blocks(dy, q, k, v, cp, sharding), exact)
            is_wrong = any(not a <= LIMIT * b + 1e-6 for a, b in zip(ours, theirs, strict=True))
            wrong += is_wrong
            print_line(
                f"{name:7} {str(dtype).removeprefix('torch.'):9} {'x'.join(map(str, shape)):18} cp {cp} {sharding:11} "
                f"{' '.join(f'{each:.1e}' for each in ours)}   torch {' '.join(f'{each:.1e}' for each in theirs)}"
                f"{'   WRONG' * is_wrong}"
            )
    print_line(f"errors of out, dq, dk, dv; {wrong} are wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
