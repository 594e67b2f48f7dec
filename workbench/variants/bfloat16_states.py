"""AdamW with states in bfloat16, which take 14 or 10 bytes per parameter instead of 18.

With `bfloat16_moments`, both moments are in bfloat16, beside float32 master weights, as in DeepSeek-V3
(arXiv:2412.19437, section 3.3.3). With `bfloat16`, there are no master weights either. An update is then often smaller
than half the distance to the next bfloat16 number, and rounding to the nearest one would lose it. Stochastic rounding
keeps the mean: a number between two neighbours becomes the upper one with the probability that makes it the expected
value (Zamirai et al. 2020, arXiv:2010.06192).

Replicas of a weight must be rounded alike, or they drift apart without an error, and a run should not depend on its
layout or on a restart. So the random bits do not come from a generator: they are a hash of the seed, the parameter's
name, the number of its update, and the number of the element in the full parameter.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from picotron.config import Training
from picotron.model.placement import main_grad, placement
from picotron.optimizer import AdamW

CHUNK = 2**22  # elements that are updated at a time, so that temporary tensors stay small


class BFloat16AdamW(AdamW):
    """`AdamW` whose states of bfloat16 parameters are in bfloat16, see `training.optimizer_states`."""

    def __init__(self, model: nn.Module, training: Training, fused: bool) -> None:
        self.seed, self.has_masters = training.seed, training.optimizer_states == "bfloat16_moments"
        super().__init__(model, training, fused)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.elements = {
            p: Elements.of(placement(p).shared_name or names[p], p) for p in self.masters if p.dtype == torch.bfloat16
        }
        on_gpu = any(master.is_cuda for master in self.masters.values())
        compiles = on_gpu if training.compile is None else training.compile
        self.update_elements: Callable[..., None] = (
            torch.compile(update_elements, dynamic=True) if compiles else update_elements
        )

    def master_dtype(self, parameter: Tensor) -> torch.dtype:
        rounds = parameter.dtype == torch.bfloat16 and not self.has_masters
        return parameter.dtype if rounds else super().master_dtype(parameter)

    def moment_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.bfloat16 if parameter.dtype == torch.bfloat16 else super().moment_dtype(parameter)

    def new_state(self, parameter: nn.Parameter, updates: int) -> dict[str, Tensor]:
        state = super().new_state(parameter, updates)
        # Each update reads the number, for which the CPU would wait on a GPU.
        return state | {"step": state["step"].cpu()} if parameter in self.elements else state

    def update_masters(self, parameters: list[nn.Parameter]) -> None:
        groups = {master: group for group in self.param_groups for master in group["params"]}
        for parameter in parameters:
            if parameter in self.elements and self.masters[parameter] in groups:
                self.update_in_chunks(parameter, self.elements[parameter], groups[self.masters[parameter]])
        super().update_masters([parameter for parameter in parameters if parameter not in self.elements])

    def update_in_chunks(self, parameter: nn.Parameter, elements: "Elements", group: dict[str, Any]) -> None:
        """Update a parameter's master weight, and its moments, with the numbers of its group."""
        master = self.masters[parameter]
        state = self.state[master]
        if not state:
            state |= self.new_state(parameter, 0)
        state["step"] += 1
        step, lr, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
        numbers = [1 - lr * group["weight_decay"], lr / (1 - beta1**step), math.sqrt(1 - beta2**step)]
        factors = torch.tensor(numbers).to(master.device, non_blocking=True)  # tensors: compiled code has no constants
        keys = torch.tensor(elements.keys(self.seed, step), dtype=torch.int32).to(master.device, non_blocking=True)
        tensors = [master.detach(), state["exp_avg"], state["exp_avg_sq"], main_grad(parameter)]
        chunks = zip(*(each.view(-1).split(CHUNK) for each in tensors), strict=True)
        for i, chunk in enumerate(chunks):
            numbers_of_chunk = elements.numbers(i * CHUNK, len(chunk[0]), master.device)
            self.update_elements(*chunk, numbers_of_chunk, keys, factors, beta1, beta2, group["eps"])


def update_elements(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    keys: Tensor,
    factors: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update elements of a weight and of its moments, (n) each, as AdamW does, in float32, and round them.

    The first moment is rounded to the nearest number. The second one is rounded stochastically: a decay by less than
    2^-9, as with beta2 = 0.999, would never change the nearest number.

    Args:
        numbers: numbers of the elements, and `keys`: see `random_bits`.
        factors: weight decay's factor, the learning rate over the first moment's bias correction, and the root of the
            second moment's.
    """
    decay, rate, correction = factors.unbind()
    bits = random_bits(numbers, keys)
    m = exp_avg.float().lerp_(gradient, 1 - beta1)
    v = exp_avg_sq.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    w = weight.float() * decay - m.mul(rate).div_(v.sqrt().div_(correction).add_(eps))
    exp_avg.copy_(m)
    round_stochastically(exp_avg_sq, v, bits >> 16)
    if weight.dtype == torch.bfloat16:
        round_stochastically(weight, w, bits)
    else:
        weight.copy_(w)


def round_stochastically(target: Tensor, values: Tensor, bits: Tensor) -> None:
    """Round float32 values to a bfloat16 tensor, whose numbers are the upper halves of theirs: add 16 random bits to
    the lower halves, and cut these off.

    Infinity and NaN stay. (The NaN of a GPU, 0x7FFFFFFF, would become -0 in the sum.)
    """
    rounded = (values.view(torch.int32) + (bits & 0xFFFF) & ~0xFFFF).view(torch.float32)
    target.copy_(torch.where(values.isfinite(), rounded, values))


def random_bits(numbers: Tensor, keys: Tensor) -> Tensor:
    """Hash int32 numbers (n) and two int32 keys to 32 random bits each. The multipliers are those of a search for
    integer hashes with little bias (github.com/skeeto/hash-prospector).
    """
    x = numbers ^ keys[0]
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x21F0AAAD  # products of int32 are modulo 2^32
    x = (x ^ (x >> 15 & 0x1FFFF) ^ keys[1]) * 0x735A2D97
    return x ^ (x >> 15 & 0x1FFFF)


@dataclasses.dataclass(frozen=True)
class Elements:
    """The elements of a parameter that this rank updates, by their numbers in the full parameter: its element i has the
    number `first + j + j // columns * skipped`, for j = i + offset.

    Attributes:
        name: that of the parameter.
        first: number of the shard's first element.
        offset: place in the flattened shard of the first element that this rank owns.
        columns: elements in a row of the shard.
        skipped: elements in a row of the full parameter that the shard lacks.
    """

    name: str
    first: int = 0
    offset: int = 0
    columns: int = 1
    skipped: int = 0

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> "Elements":
        """Read them from the parameter's `Placement`."""
        shard, owned, columns = placement(parameter).shard, placement(parameter).owned, parameter.shape[1:].numel()
        offset = 0 if owned is None else owned.bounds(owned.rank)[0]
        if shard is None:
            return cls(name, 0, offset, columns)
        if shard.dim == 0:
            return cls(name, shard.start * columns, offset, columns)
        return cls(name, shard.start, offset, columns, shard.full_size - columns)

    def numbers(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return the numbers of elements `start` to `start + count`, modulo 2^31, in int32."""
        j = torch.arange(self.offset + start, self.offset + start + count, device=device)
        skipped = j // self.columns * self.skipped if self.skipped else 0
        return (self.first + j + skipped & 2**31 - 1).int()

    def keys(self, seed: int, update: int) -> tuple[int, int]:
        """Return the keys of an update's random bits, two int32 numbers."""
        digest = hashlib.sha256(f"{seed} {self.name} {update}".encode()).digest()
        return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:8], "little", signed=True)
