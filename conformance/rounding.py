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
from conformance.precision import FACTORS, UNIT, factors_of, means_of
from conformance.reference import Reference, named_like, train

RUNS, NOISE = 24, 2**21
# A normal number is outside of six standard deviations, estimated from 24 runs, once in 290,000 cases.
DEVIATIONS = 6
# A tensor may be off by this many times its root mean square error, a mean over its elements, which varies little.
MEANS = 1.7
WIDE = ("Norm", "RotaryEmbedding")  # modules that compute in float32 in narrower dtypes, as the loss does
COPIES = ("clone", "_to_copy", "embedding")


class Rounding(TorchDispatchMode):
    """Context in which results get a random relative error of at most half a unit in the last place of a dtype, and
    weights are cast to it. (In bfloat16, a weight of 1 does not show a small update, in any run.)

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
        """Give each weight the error of an update that is rounded to float32, or to the dtype if that is wider; and all
        matrices that of 1 - lr * decay.
        """
        unit, common = min(self.unit, UNIT / 2), self.random.uniform(-2, 2)
        for parameter in model.parameters():
            noise = 2 * torch.rand(parameter.shape, dtype=parameter.dtype, generator=self.generator) - 1
            parameter.mul_(1 + unit * (noise + common * (parameter.ndim > 1)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.alias_info is not None for each in func._schema.returns):  # a view
            return func(*args, **(kwargs or {}))
        found = func(*tree_map_only(Tensor, self.cast, args), **(kwargs or {}))
        return found if func.overloadpacket.__name__ in COPIES else tree_map_only(Tensor, self.round_, found)


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
    return {key: DEVIATIONS * root_mean_square(each) + LIMIT for key, each in errors.items()}


def limits_of(cases: Sequence[Case], right: Reference) -> Limits:
    """Return what rounding to the dtype of a run explains.

    Args:
        cases: the cases of the run, of which each resumes from the one before.
        right: the reference of the run.
    """
    errors, exact = dict[Key, list[float]](), dataclasses.replace(cases[-1], dtype="float64")
    for seed in range(RUNS):
        model = exact.model()
        found = train(model, exact, exact.batch, rounding=Rounding(cases[-1].torch_dtype, seed, model))
        found = named_like(found, right.initial)
        for case in cases:
            part, want = found.of(case), right.of(case)
            every = errors_of_reference(part, want, case.first_step)
            for key, error in (every | factors_of(case, part.gradients, part.weights, want)).items():
                errors.setdefault(key, []).append(error)
    spread = {key: root_mean_square(each) for key, each in errors.items()}
    # The same tensors of all layers and steps vary alike, and the largest of their deviations is known better.
    alike = dict[tuple[str, str], float]()
    for (what, name, _), each in spread.items():
        group = what, re.sub(r"\d+", "", name)
        alike[group] = max(each, alike.get(group, 0.0))
    limits = dict[Key, float]()
    for (what, name, step), each in spread.items():
        if what in FACTORS:
            limits[what, name, step] = DEVIATIONS * alike[what, re.sub(r"\d+", "", name)]
            limits[f"spread of {what}", name, step] = each
        else:  # a number is a sum in float32 in any dtype
            limits[what, name, step] = MEANS * each if name else DEVIATIONS * each + 8 * UNIT
    runs = [means_of({key: each[run] for key, each in errors.items()}, limits) for run in range(RUNS)]
    return limits | {key: DEVIATIONS * root_mean_square([run[key] for run in runs]) for key in runs[0]}


def root_mean_square(numbers: list[float]) -> float:
    return math.sqrt(sum(x**2 for x in numbers) / len(numbers))
