"""Bounds for narrow dtypes: the reference in float64, with the result of every operation rounded at random.

(Monte Carlo arithmetic, Parker 1997: rounding errors behave like independent random numbers, so that their effect on a
result is the spread of the result over several runs.) A trainer in bfloat16 rounds the results of its operations to 8
bits. So its results may differ from the exact ones as much as those of a run whose results get random errors of at most
half a unit in the 8th bit, and not more.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from conformance.case import Case
from conformance.compare import Key, errors_of_reference
from conformance.reference import Reference, train

RUNS = 12
DEVIATIONS = {"number": 6, "tensor": 2}
# A normal number is outside of six standard deviations, estimated from 12 runs, once in 16,000 cases. The error of a
# tensor is a mean over its elements, which varies little: twice this mean allows for four times the roundings.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu", "embedding")


class Rounding(TorchDispatchMode):
    """Context in which results get a random relative error of at most half a unit in the last place of a dtype. The
    operands of matrix products get one, too, because they are cast to this dtype before. The errors are the same in
    each step: weights that hardly change are rounded in the same way each time.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.unit, self.seed, self.generator = torch.finfo(dtype).eps / 2, seed, torch.Generator()

    def __enter__(self) -> Any:
        self.generator.manual_seed(self.seed)
        return super().__enter__()

    def round_(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        noise = torch.rand(x.shape, dtype=x.dtype, generator=self.generator)
        return x.mul_(1 + self.unit * (2 * noise - 1))

    @torch.no_grad()
    def round_weights(self, model: nn.Module) -> None:
        """Give each weight the error of an update that is rounded to float32, or to the dtype if that is wider."""
        unit = min(self.unit, torch.finfo(torch.float32).eps / 2)
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, dtype=parameter.dtype, generator=self.generator)
            parameter.mul_(1 + unit * (2 * noise - 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            args = tree_map_only(Tensor, lambda x: self.round_(x.clone()), args)
        found = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        return found if is_view else tree_map_only(Tensor, self.round_, found)


def bounds(case: Case, right: Reference) -> dict[Key, float]:
    """Return the largest error that rounding to the dtype of a case explains, for each number and tensor."""
    squares: dict[Key, float] = {}
    exact = dataclasses.replace(case, dtype="float64")
    for seed in range(RUNS):
        found = train(exact.model(), exact, case.batch, rounding=Rounding(case.torch_dtype, seed))
        for key, error in errors_of_reference(found, right).items():
            squares[key] = squares.get(key, 0.0) + error**2
    kinds = {key: "tensor" if isinstance(key[1], str) else "number" for key in squares}
    return {key: DEVIATIONS[kinds[key]] * math.sqrt(square / RUNS) for key, square in squares.items()}
