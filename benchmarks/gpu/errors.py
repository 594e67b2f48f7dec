"""The largest relative errors of a function and of torch's, compared with a plain formula in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from conformance.oracle import relative_error

# Rounding to bfloat16 is an error of up to 2^-9 = 2e-3, and a backward rounds several times. In float32, rounding is an
# error of up to 6e-8, and kernels may split the numbers into several TF32 numbers. A wrong mask, scale or sum is an
# error of 0.1 to 1. (Rotary angles of thousands of radians, in float32, get the limit of bfloat16.)
LIMITS = {torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Draw normal numbers, which differ from call to call and not from run to run."""
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def with_gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the function's result, and the gradients of all inputs for the gradient dy of the result."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = function(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def largest_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))


def errors(
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    dy: Tensor,
    *inputs: Tensor,
) -> list[float]:
    """Return the largest relative errors, of the result and all gradients, of our function and of torch's."""
    expected = with_gradients(exact, dy.double(), *(each.double() for each in inputs))
    return [largest_error(with_gradients(function, dy, *inputs), expected) for function in (ours, torchs)]
