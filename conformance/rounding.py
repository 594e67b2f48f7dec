"""Bounds for narrow dtypes: the reference in float64, with the result of every operation rounded at random.

(Monte Carlo arithmetic, Parker 1997: rounding errors behave like independent random numbers, so that their effect on a
result is the spread of the result over several runs.) A trainer in bfloat16 rounds the results of its operations to 8
bits. So its results may differ from the exact ones as much as those of a run whose results get random errors of at most
half a unit in the 8th bit, and not more.
"""

import dataclasses
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from conformance.case import Case
from conformance.compare import LIMIT, Key, Limits, errors_of_reference
from conformance.precision import UNIT, Factors, bias, factors_of
from conformance.reference import Reference, named_like, train

RUNS, NOISE = 12, 2**21
# A normal number is outside of six standard deviations, estimated from 12 runs, once in 16,000 cases.
DEVIATIONS = 6
TENSORS = 6  # of the largest deviation among the same tensors of all layers and steps
# A tensor may be off by this many times its root mean square error, a mean over its elements, which varies little.
MEANS = 1.7
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
        # Of this, each result takes a part: to draw as many numbers takes longer than to compute.
        self.random, noise = random.Random(seed), torch.rand(NOISE, dtype=torch.float64, generator=self.generator)
        self.factors = 1 + self.unit * (2 * noise - 1)
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
        if x.numel() > NOISE:
            return torch.cat([self.round_(part) for part in x.flatten().split(NOISE)]).view(x.shape)
        start = self.random.randrange(NOISE - x.numel() + 1)
        return x.mul_(self.factors[start : start + x.numel()].view(x.shape).to(x.dtype))  # a mask can have -inf

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


class Nudged:
    """Hook of the module of rotary angles: changes half of the sines and cosines by a unit in the last place of
    float32, as other ways to compute them do (torch.polar, another device).
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return tree_map_only(Tensor, self.nudge, output)

    def nudge(self, x: Tensor) -> Tensor:
        towards = torch.randint(-1, 2, x.shape, generator=self.generator).float() * 2
        near = torch.nextafter(x.float(), towards)
        return torch.where(towards == 0, x, near.to(x.dtype))


def limits_of_rotary(case: Case, right: Reference) -> Limits:
    """Return what the last bits of float32 rotary tables explain in a case in float64."""
    errors = dict[Key, list[float]]()
    for seed in range(3):
        model = case.model()
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(Nudged(seed))
        found = named_like(train(model, case, case.batch), right.initial)
        for key, error in errors_of_reference(found.of(case), right.of(case), case.first_step).items():
            errors.setdefault(key, []).append(error)
    return Limits({key: DEVIATIONS * root_mean_square(each) + LIMIT for key, each in errors.items()})


def limits_of(cases: Sequence[Case], right: Reference) -> Limits:
    """Return what rounding to the dtype of a run explains.

    Args:
        cases: the cases of the run, of which each resumes from the one before.
        right: the reference of the run.
    """
    errors, factors = dict[Key, list[float]](), list[Factors]()
    exact = dataclasses.replace(cases[-1], dtype="float64")
    for seed in range(RUNS):
        model, every = exact.model(), Factors()
        found = train(model, exact, exact.batch, rounding=Rounding(cases[-1].torch_dtype, seed, model))
        found = named_like(found, right.initial)
        for case in cases:
            part, want = found.of(case), right.of(case)
            for key, error in errors_of_reference(part, want, case.first_step).items():
                errors.setdefault(key, []).append(error)
            every |= factors_of(case, part.gradients, part.weights, want)
        factors.append(every)
    bounds = {  # a number is a sum in float32 in any case
        key: DEVIATIONS * root_mean_square(each) + 8 * UNIT if not key[1] else MEANS * root_mean_square(each)
        for key, each in errors.items()
    }
    spread = {
        key: {name: root_mean_square([run[key][name] for run in factors]) for name in names}
        for key, names in factors[0].items()
    }
    shares = {key: {name: each**-2 for name, each in names.items()} for key, names in spread.items()}
    biases = {key: DEVIATIONS * root_mean_square([bias(run[key], shares[key]) for run in factors]) for key in shares}
    # The same tensors of all layers and steps vary alike, and the largest of their deviations is known better.
    alike = dict[tuple[str, str], float]()
    for (what, _), names in spread.items():
        for name, each in names.items():
            group = what, re.sub(r"\d+", "", name)
            alike[group] = max(each, alike.get(group, 0.0))
    largest: Factors = {}
    for kind, names in spread.items():
        largest[kind] = {name: TENSORS * alike[kind[0], re.sub(r"\d+", "", name)] for name in names}
        if kind[0] == "update":  # to round its numbers, such as 1 - lr * decay, to float32 changes all weights alike
            unit = {
                name: UNIT
                * size_of(right.initial[name])
                / size_of(right.after[kind[1] - 1][name] - right.initial[name])
                for name in names
            }
            largest[kind] = {name: each + 4 * unit[name] for name, each in largest[kind].items()}
            biases[kind] += 4 * max(unit.values())
    return Limits(bounds, shares, biases, largest)


def size_of(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def root_mean_square(numbers: list[float]) -> float:
    return math.sqrt(sum(x**2 for x in numbers) / len(numbers))
