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
from conformance.compare import Key, Limits, errors_of_reference
from conformance.precision import UNIT, Factors, bias, factors_of
from conformance.reference import Reference, named_like, train

RUNS = 12
# A normal number is outside of six standard deviations, estimated from 12 runs, once in 16,000 cases.
DEVIATIONS = 6
# A tensor may be off by this many times its root mean square error, a mean over its elements, which varies little.
MEANS = 2.5
WIDE = ("Norm", "RotaryEmbedding")  # modules that compute in float32 in narrower dtypes, as the loss does
COPIES = ("clone", "_to_copy", "embedding")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu", "embedding")


class Rounding(TorchDispatchMode):
    """Context in which results get a random relative error of at most half a unit in the last place of a dtype. Of
    the operands of matrix products, weights are cast to the dtype; the others are results, which have their errors.

    Args:
        model: the model, whose modules `WIDE` only round their outputs.
    """

    def __init__(self, dtype: torch.dtype, seed: int, model: nn.Module) -> None:
        super().__init__()
        self.unit, self.generator = torch.finfo(dtype).eps / 2, torch.Generator().manual_seed(seed)
        self.is_wide, self.dtype = False, dtype
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for module in model.modules():
            if dtype != torch.float32 and type(module).__name__.endswith(WIDE):
                module.register_forward_pre_hook(self.widen)
                module.register_forward_hook(self.narrow)

    def widen(self, *_: object) -> None:
        self.is_wide = True

    def narrow(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.is_wide = False
        return tree_map_only(Tensor, lambda x: x * 1, output)  # rounds

    def round_(self, x: Tensor) -> Tensor:
        if self.is_wide or not x.is_floating_point():
            return x
        noise = torch.empty(x.shape).uniform_(-self.unit, self.unit, generator=self.generator)
        return x.mul_(1 + noise.to(x.dtype))  # a mask can have -inf

    def cast(self, x: Tensor) -> Tensor:
        """Cast a weight to the dtype."""
        is_weight = x.untyped_storage().data_ptr() in self.weights
        return x.to(self.dtype).to(x.dtype) if is_weight else x

    @torch.no_grad()
    def round_weights(self, model: nn.Module) -> None:
        """Give each weight the error of an update that is rounded to float32, or to the dtype if that is wider."""
        unit = min(self.unit, torch.finfo(torch.float32).eps / 2)
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, dtype=parameter.dtype, generator=self.generator)
            parameter.mul_(1 + unit * (2 * noise - 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            args = tree_map_only(Tensor, self.cast, args)
        found = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        return found if is_view or func.overloadpacket.__name__ in COPIES else tree_map_only(Tensor, self.round_, found)


def limits_of(case: Case, right: Reference) -> Limits:
    """Return what rounding to the dtype of a case explains."""
    errors, factors = dict[Key, list[float]](), list[Factors]()
    exact = dataclasses.replace(case, dtype="float64")
    for seed in range(RUNS):
        model = exact.model()
        found = train(model, exact, case.batch, rounding=Rounding(case.torch_dtype, seed, model))
        found = named_like(found, right.initial)
        for key, error in errors_of_reference(found, right).items():
            errors.setdefault(key, []).append(error)
        factors.append(factors_of(found.gradients, found.weights, right))
    bounds = {  # a number is a sum in float32 in any case
        key: DEVIATIONS * root_mean_square(each) + 8 * UNIT
        if isinstance(key[1], int)
        else MEANS * root_mean_square(each)
        for key, each in errors.items()
    }
    shares = {
        key: {name: root_mean_square([run[key][name] for run in factors]) ** -2 for name in names}
        for key, names in factors[0].items()
    }
    spreads = {key: root_mean_square([bias(run[key], shares[key]) for run in factors]) for key in shares}
    return Limits(bounds, shares, {key: DEVIATIONS * each for key, each in spreads.items()})


def root_mean_square(numbers: list[float]) -> float:
    return math.sqrt(sum(x**2 for x in numbers) / len(numbers))
