"""Attention in rows that hold several documents, each of which attends to itself only.

With a mask, a kernel would compute the scores between documents only to drop them. Instead, each document is computed
separately: on a GPU by one kernel for documents of different lengths, elsewhere by one call per document.
"""

import dataclasses
import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron.model.llama import AttentionFn, Llama, fused_attention
from workbench.run.launch import has_bfloat16_attention

SHARES_HEADS = torch.__version__ >= "2.12"  # varlen_attn has enable_gqa


# Neither frozen (as of torch 2.11) nor with eq: torch.compile would compile again for every other length of a tuple.
@dataclasses.dataclass(eq=False)
class PackedDocuments:
    """Where the documents of a micro-batch begin and end, on the CPU, which launches kernels, and on the device.

    Args:
        boundaries: numbers of the tokens with which documents begin, among all B T tokens of the micro-batch, row after
            row and with those of all context-parallel ranks, followed by B T. Every row begins a document.
        cu_seqlens: the same, (documents + 1,) in int32, on the device. (The name is that of the kernels' argument: the
            cumulative sequence lengths.)
        has_kernel: whether the device has the kernel for documents of different lengths, in bfloat16.
    """

    boundaries: tuple[int, ...]
    cu_seqlens: Tensor
    has_kernel: bool

    @classmethod
    def of(cls, cu_seqlens: Tensor, device: torch.device) -> "PackedDocuments":
        """Return the documents of a batch.

        Args:
            cu_seqlens: the boundaries on the CPU. (From a GPU, the CPU would wait for them.)
        """
        has_kernel = device.type == "cuda" and has_bfloat16_attention(device)
        return cls(tuple(cu_seqlens.tolist()), cu_seqlens.to(device, torch.int32, non_blocking=True), has_kernel)


def limit_to_documents(llama: Llama, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Limit attention to the documents of a micro-batch, if it has `cu_seqlens`: a hook before the forward of a Llama
    whose `attention_fn` takes `documents`.
    """
    cu_seqlens = kwargs.pop("cu_seqlens", None)
    if cu_seqlens is not None:
        kwargs["attention_fn"] = within_documents(
            llama.attention_fn, cu_seqlens, (args[0] if args else kwargs["input_ids"]).device
        )
    return args, kwargs


def within_documents(attention_fn: AttentionFn, cu_seqlens: Tensor, device: torch.device) -> AttentionFn:
    """Return an attention function for a micro-batch whose documents have these boundaries."""
    return functools.partial(attention_fn, documents=PackedDocuments.of(cu_seqlens, device))


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `fused_attention` with plain matmul and softmax, which keep the scores (B, H, T, T) in memory."""
    with sdpa_kernel(SDPBackend.MATH):
        return fused_attention(q, k, v)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, attention_fn: AttentionFn = fused_attention
) -> Tensor:
    """Compute causal attention within each document: for `fused_attention`, by the kernel for documents of different
    lengths if it supports the device and the dtype; else by one call of `attention_fn` per document.

    q (B, H, T, d); k, v (B, K, T, d), where H is a multiple of K -> (B, H, T, d)
    """
    if attention_fn is not fused_attention or not documents.has_kernel or q.dtype != torch.bfloat16:
        return attend_per_document(q, k, v, documents, attention_fn)
    from torch.nn.attention.varlen import varlen_attn  # earlier versions of torch, which suffice for CPUs, lack it

    B, T = q.size(0), q.size(2)
    options: dict[str, Any] = {"window_size": (-1, 0)}  # all tokens before a query, none after it
    if SHARES_HEADS:
        options["enable_gqa"] = True
    else:
        k, v = (heads.repeat_interleave(q.size(1) // heads.size(1), dim=1) for heads in (k, v))
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))  # (B T, heads, d)
    # T as the longest document is an upper limit, which does not change from batch to batch.
    y = varlen_attn(q, k, v, documents.cu_seqlens, documents.cu_seqlens, T, T, **options)
    assert isinstance(y, Tensor)  # other results only on request
    return y.unflatten(0, (B, T)).transpose(1, 2)


@torch.compiler.disable  # torch.compile would compile it again for every new set of lengths
def attend_per_document(
    q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments, attention_fn: AttentionFn
) -> Tensor:
    """Apply `attention_fn` to one document after the other. Shapes: see `packed_attention`."""
    lengths = [end - start for start, end in pairwise(documents.boundaries)]
    tokens = (each.transpose(1, 2).flatten(0, 1).split(lengths) for each in (q, k, v))  # (t, heads, d) per document
    outputs = []
    for document in zip(*tokens, strict=True):
        y = attention_fn(*(each.transpose(0, 1)[None] for each in document))  # (1, H, t, d)
        outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs).view(q.size(0), q.size(2), *q.shape[1::2]).transpose(1, 2)
