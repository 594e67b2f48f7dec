"""Numbers for docs/numerics.md: python -m docs.programs.numerics sums, updates, equality or scale."""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from picotron.collectives import accumulation_dtype
from workbench.console import print_line, text_table
from workbench.variants.bfloat16_states import round_stochastically


def sums() -> list[list[str]]:
    rows = [["terms", "1 + 1 + ... in bfloat16", "error of gradients: bfloat16", "float32"]]
    for count in (4, 64, 256, 1024):
        one, gradients = torch.ones((), dtype=torch.bfloat16), (torch.randn(count, 4096) + 0.5).bfloat16()
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            total = torch.zeros(4096, dtype=dtype)
            for gradient in gradients:
                total += gradient  # rounds to the dtype of the total
            found.append(relative(total, gradients.double().sum(0)))
        rows.append([str(count), f"{sum([one] * count, 0 * one).item():g}", *found])
    return rows


def updates() -> list[list[str]]:
    rows = [["updates of -0.001", "float32", "bfloat16", "bfloat16, rounded at random"]]
    exact, nearest, random = torch.ones(()), torch.ones((), dtype=torch.bfloat16), torch.ones(4096).bfloat16()
    for count in range(1, 501):
        exact -= 0.001
        nearest -= 0.001
        round_stochastically(random, random.float() - 0.001, torch.randint(2**16, (4096,), dtype=torch.int32))
        if count in (1, 100, 500):
            rows.append([str(count), *(f"{weight.float().mean():.4f}" for weight in (exact, nearest, random))])
    return rows


def gradient(dtype: torch.dtype, tp: int = 1, eps: float = 1e-5, total: torch.dtype | None = None) -> Tensor:
    """Return the gradient of a matrix from 16 micro-batches, whose product is a sum of `tp` partial ones."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(shape, generator=generator) for shape in ((16, 32, 64), (256, 64), (64, 256)))
    up, down = up.to(dtype).requires_grad_(), down.to(dtype)
    result = torch.zeros(up.shape, dtype=total or accumulation_dtype(up))
    for micro_batch in x.to(dtype):
        h = F.silu(F.rms_norm(micro_batch, (64,), eps=eps) @ up.T)
        parts = (a @ b.T for a, b in zip(h.chunk(tp, 1), down.chunk(tp, 1), strict=True))
        y = sum(parts, torch.zeros((), dtype=dtype))
        result += torch.autograd.grad(y.square().sum(), up)[0]
    return result


def equality() -> list[list[str]]:
    changes: dict[str, Callable[[torch.dtype], Tensor]] = {
        "four partial sums, as with tp 4": lambda dtype: gradient(dtype, tp=4),
        "mistake: eps 1e-6 instead of 1e-5": lambda dtype: gradient(dtype, eps=1e-6),
        "mistake: gradients add up in the model's dtype": lambda dtype: gradient(dtype, total=dtype),
    }
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    return [["change", "float64", "float32", "bfloat16"]] + [
        [name, *(relative(change(dtype), gradient(dtype)) for dtype in dtypes)] for name, change in changes.items()
    ]


def scale() -> list[list[str]]:
    tokens, logits = 4096, torch.randn(16, 32_768, generator=torch.Generator().manual_seed(0))
    exact = logits.softmax(-1)
    exact[:, 0] -= 1  # token 0 is the target
    rows = [["loss scale", "became 0", "became infinite", "error of the others"]]
    for factor in (1, 2**8, 2**16, 2**28, 2**32):
        rounded = (exact / tokens * factor).half()
        kept = rounded.isfinite() & (rounded != 0)
        shares = [f"{(rounded == 0).double().mean():.1%}", f"{rounded.isinf().double().mean():.3%}"]
        rows.append([f"{factor:,}", *shares, relative(rounded[kept].double() / factor * tokens, exact[kept])])
    return rows


def relative(found: Tensor, exact: Tensor) -> str:
    return f"{((found.double() - exact.double()).norm() / exact.double().norm()).item():.0e}"


if __name__ == "__main__":
    torch.manual_seed(0)
    print_line(text_table({"sums": sums, "updates": updates, "equality": equality, "scale": scale}[sys.argv[1]]()))
