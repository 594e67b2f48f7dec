"""Kernels and hand-written backwards, compared with plain formulas in float64, and torch's own kernels beside them."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from benchmarks.gpu.attention import attention_checks
from benchmarks.gpu.errors import LIMITS, draw, errors, largest_error, name_of
from benchmarks.gpu.report import Check, Content, Options, checked, header
from benchmarks.shapes import LLAMA3_ROPE
from conformance.oracle import our_model, tiny_llama
from picotron.config import Training
from picotron.model.cross_entropy import VocabularyShard, linear_cross_entropy
from picotron.model.llama import RMSNorm, rope
from picotron.model.placement import set_main_grad
from picotron.optimizer.optimizer import AdamW
from picotron.process_group_manager import setup_process_group_manager
from workbench.pipelines.split_backward import defer_weight_grads, run_deferred, split_backward


def loss_errors(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, vocab: int) -> list[float]:
    x, weight = draw(device, dtype, 2, tokens, hidden), draw(device, dtype, vocab, hidden) * (3 / math.sqrt(hidden))
    targets = torch.randint(vocab, (2, tokens), device=device)
    targets[0, :5] = -100  # ignored
    group = setup_process_group_manager(1, 1, 1, 1).tp_group

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, VocabularyShard(0, vocab, group))

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        logits = (x @ weight.t()).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())

    return errors(ours, torchs, torchs, torch.tensor(3.0, device=device), x, weight)


def norm_errors(device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> list[float]:
    def norm(kind: type[nn.Module]) -> Callable[[Tensor, Tensor], Tensor]:
        def apply(x: Tensor, weight: Tensor) -> Tensor:
            module = kind(hidden, 1e-5).to(device, weight.dtype)
            return torch.func.functional_call(module, {"weight": weight}, x)

        return apply

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    x, weight, dy = (
        draw(device, dtype, tokens, hidden),
        draw(device, dtype, hidden),
        draw(device, dtype, tokens, hidden),
    )
    return errors(norm(RMSNorm), norm(LlamaRMSNorm), exact, dy, x, weight)


def optimizer_errors(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Compare the weights after three steps with torch's plain AdamW in float64, and torch's fused one beside it."""
    training = Training(learning_rate=0.1)
    start = [draw(device, dtype, 300, 200), draw(device, dtype, 200)]
    gradients = [[draw(device, torch.float32, *each.shape) for each in start] for _ in range(3)]
    wide = torch.promote_types(dtype, torch.float32)

    def torchs(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        weights = [each.to(dtype, copy=True).requires_grad_() for each in start]
        groups = [
            {"params": weights[:1], "weight_decay": training.weight_decay},
            {"params": weights[1:], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=fused, foreach=False)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.to(dtype)
            optimizer.step()
        return [each.detach() for each in weights]

    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = AdamW(nn.ParameterList(parameters), training, fused=True)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            set_main_grad(parameter, gradient.to(wide))
        optimizer.step()
    masters = [optimizer.masters[each].detach() for each in parameters]
    assert all(torch.equal(each, master.to(dtype)) for each, master in zip(parameters, masters, strict=True))
    expected = torchs(torch.float64, fused=False)
    return [largest_error(found, expected) for found in (masters, torchs(wide, fused=True))]


def rope_errors(device: torch.device, dtype: torch.dtype, positions: int) -> list[float]:
    """Compare cosines and sines with those of exact angles: (position in float64) x (transformers' frequencies)."""
    config = tiny_llama(head_dim=64, rope_parameters=LLAMA3_ROPE, max_position_embeddings=131072)
    transformers, ids = LlamaRotaryEmbedding(config), torch.arange(positions, device=device)[None]
    angles = ids.double()[0, :, None] * transformers.inv_freq.to(device)
    expected = [angles.cos(), angles.sin()]
    found = [each[0, :, 0] for each in rope(config, ids)]
    theirs = [each[0, :, :32] for each in transformers.to(device)(torch.empty(0, device=device), ids)]
    return [largest_error(each, expected) for each in (found, theirs)]


def split_errors(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Compare a model's gradients, of a backward in two halves, with those of a normal backward."""
    config = tiny_llama(initializer_range=0.05)
    ids = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(dtype: torch.dtype, split: bool) -> list[Tensor]:
        model = our_model(config, dtype).to(device)
        if split:
            split_backward(model)
        with defer_weight_grads() as deferred:
            model(ids[:, :-1], target_ids=ids[:, 1:]).backward()
        assert len(deferred) == 7 * config.num_hidden_layers * split
        run_deferred(deferred)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(torch.float64, split=False)
    return [largest_error(gradients(dtype, split), expected) for split in (True, False)]


def other_checks(options: Options) -> Iterator[Check]:
    tokens, hidden, vocabs = (1500, 2048, (49152, 128256)) if options.on_gpu else (300, 16, (61,))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        master_dtype = torch.promote_types(dtype, torch.float32)
        checks: list[tuple[str, str, torch.dtype, Callable[..., list[float]], tuple[int, ...]]] = [
            ("`linear_cross_entropy`", f"{2 * tokens} tokens of {vocab}", dtype, loss_errors, (tokens, hidden, vocab))
            for vocab in vocabs
        ]
        checks += [
            ("`RMSNorm`", f"{tokens} x {hidden}", dtype, norm_errors, (tokens, hidden)),
            ("`AdamW`, 3 steps", "300 x 200, and 200", master_dtype, optimizer_errors, ()),
            ("`split_backward` of a model", "3 layers", dtype, split_errors, ()),
        ]
        if dtype == torch.float32:  # whatever the dtype of the model
            checks.append(("`rope`, llama3", "8192 positions", torch.bfloat16, rope_errors, (8192,)))
        for kernel, size, precision, function, sizes in checks:
            run = functools.partial(function, options.device, dtype, *sizes)
            yield Check([kernel, name_of(dtype), size], run, LIMITS[precision])


def kernels_section(options: Options) -> Content:
    """Return the section of the report."""
    return [
        "Each kernel runs forward and backward on random numbers. The reference is its definition, in float64 on the same device.",
        "An error is the largest |a - b| of a tensor divided by its largest |b|; the table has the largest one of the result and",
        "all gradients. The column torch has the error of torch's own function (of transformers', for the norm), in the same",
        "dtype. Attention to blocks is that of all ranks of context parallelism, computed one after the other.",
        *header("kernel", "dtype", "size", "picotron", "torch", "limit", "result"),
        *checked(itertools.chain(attention_checks(options), other_checks(options)), limit=20),
    ]
