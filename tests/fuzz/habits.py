"""What programs do to a module beside training it: torch's hooks, copies and averages, a second model, and errors in
the middle of a step. Each is an operation of a program, see `programs`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from picotron.console import UserError


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Interrupted(Exception):
    """An error of the user's own code."""


def interrupt(*_: Any) -> None:
    raise Interrupted


HOOKS: dict[str, Callable[[nn.Module], Any]] = {  # which halve an output, or a gradient
    "forward": lambda module: module.register_forward_hook(lambda _, x, y: y / 2),
    "backward": lambda module: module.register_full_backward_hook(lambda _, dx, dy: (dx[0] / 2,)),
}


class Habits:
    """Operations that are the same on the bare module and on a wrapped one."""

    net: nn.Module
    call: Any
    optimizer: Any
    result: dict[str, Any]
    averaged: AveragedModel | None = None

    def note(self, number: Tensor | float) -> None:
        self.result["losses"].append(float(number))

    def note_weights(self, numbers: Tensor) -> None:
        """Note what was read of the weights, which with ZeRO-3 is NaN outside of their module."""
        if numbers.isnan():
            raise UserError("with ZeRO-3, weights are NaN outside of their module")
        self.note(numbers)

    def average(self) -> None:
        if self.averaged is None:
            self.averaged = AveragedModel(self.net)
        self.averaged.update_parameters(self.net)
        self.note_weights(parameters_to_vector(self.averaged.parameters()).detach().square().sum())

    def twin(self, how: str, seed: int) -> None:
        """Train a copy of the module."""
        twin = copy.deepcopy(self.call if how == "wrapped" else self.net)
        optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.1)
        for i in range(3):
            loss = twin(drawn(seed + i, 4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.note(loss.detach())

    def hook(self, kind: str) -> None:
        HOOKS[kind](self.net.get_submodule("layers.2"))

    def count_steps(self) -> None:
        counts: list[int] = []
        self.optimizer.register_step_pre_hook(lambda *_: counts.append(1))
        self.optimizer.register_step_post_hook(lambda *_: self.note(len(counts)))

    def compute(self, how: str) -> None:
        """Let a bias be computed from its parameter, unless it is already."""
        module = self.net.get_submodule("layers.3")
        if "bias" not in dict(module.named_parameters()):
            return
        if how == "pruned":  # the smallest are
            self.note_weights(module.bias.detach().sum())
            prune.l1_unstructured(module, "bias", 0.4)
        else:
            parametrize.register_parametrization(module, "bias", nn.Softsign())

    def fails(self, where: str, seed: int) -> None:
        """Run a forward, or a backward, that an error ends, and start the step again."""
        module = self.net.get_submodule("layers.1")
        register = module.register_forward_hook if where == "forward" else module.register_full_backward_hook
        handle = register(interrupt)
        try:
            self.call(drawn(seed, 3, 6)).square().mean().backward()
            raise AssertionError("the hook was not called")
        except Interrupted:
            handle.remove()
        self.zero("optimizer")

    def zero_late(self, seed: int) -> None:
        """Set the gradients to zero between a forward and its backward."""
        loss = self.call(drawn(seed, 3, 6)).square().mean()
        self.zero("optimizer")
        loss.backward()

    def append(self) -> None:
        self.net.get_submodule("layers").append(nn.Linear(6, 6).double())  # type: ignore[operator]

    def zero(self, of: str) -> None:
        raise NotImplementedError

    def second(self, seed: int) -> None:
        """Train a second model for a step, in the middle of a step of the first one."""
        if not hasattr(self, "other"):
            self.other = type(self)(self.second_program())  # type: ignore[attr-defined]
        self.other.backward("plain", True, seed)
        self.other.clip(0.1)
        self.other.step()
        self.other.zero("optimizer")
        for kind in ("losses", "norms"):
            self.result[kind] += self.other.result[kind]
            self.other.result[kind] = []
