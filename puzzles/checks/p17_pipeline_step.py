"""Check of puzzle 17: losses and gradients of one process, and the order in which each rank runs its stage."""

import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from docs.programs.svg import colour_of
from puzzles.group import Group
from puzzles.pictures import PALE, Cell, rows
from puzzles.report import Report
from puzzles.tensors import difference, randn

SIZES = (1, 2, 4)
TOKENS, WIDTH = 3, 5


class Noted(torch.autograd.Function):
    """forward and backward: identity, which writes F or B into a list, and dy to the number of its forward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stage: "Stage") -> Tensor:
        ctx.stage, ctx.number = stage, stage.events.count("F")
        stage.events.append("F")
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.stage.events.append("B")
        ctx.stage.gradients[ctx.number] = dy
        return dy, None


class Stage(nn.Module):
    """A layer of a toy model, y = x + tanh(x W'), which remembers its forwards and backwards."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(WIDTH, WIDTH, seed=number))
        self.events: list[str] = []
        self.gradients: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return Noted.apply(x + torch.tanh(x @ self.weight.T), self)


def check(learner: ModuleType, group: Group, report: Report) -> None:
    for m in (6, 2, 1):
        where = report.case = f"m = {m}"
        report.begin(where)
        inputs = [randn(TOKENS, WIDTH, seed=100 + i) for i in range(m)]
        targets = [randn(TOKENS, WIDTH, seed=200 + i) for i in range(m)]

        def loss(y: Tensor, i: int, targets: list[Tensor] = targets) -> Tensor:
            return (y - targets[i]).square().mean()

        model, total = [Stage(number) for number in range(group.size)], torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(inputs):
            for layer in model:
                x = layer(x)
            total = total + loss(x, i) / m
        total.backward()

        stage = Stage(group.rank)
        result, _ = group.call(learner.step, stage, [x.clone() for x in inputs], loss, group)
        programs = group.gather(stage.events)
        report.picture = draw(programs)
        whole = model[group.rank]
        last = group.rank == group.size - 1
        mean = torch.as_tensor(result, dtype=torch.float64) if isinstance(result, int | float | Tensor) else result
        group.expect(mean, total.detach() * last, where, "the mean loss")
        found = difference(stage.weight.grad, whole.weight.grad, "the gradient of the stage's weight")
        swapped = [
            f"; the backward of micro-batch {i} gets the gradient that belongs to micro-batch {j}"
            for i, j in itertools.permutations(range(m), 2)
            if i in stage.gradients and not difference(stage.gradients[i], whole.gradients[j])
        ]
        group.require(not found, f"{group.here}{where}: {found}{''.join(swapped[:1])}")
        counts = {kind: stage.events.count(kind) for kind in "FB"}
        group.require(counts == {"F": m, "B": m}, f"{group.here}{where}: the stage ran {counts}, expected {m} of each")
        held = max(itertools.accumulate(1 if event == "F" else -1 for event in stage.events))
        most = min(group.size - group.rank, m)
        sentence = (
            f"{group.here}{where}: {held} micro-batches had activations at the same time, expected at most {most}"
        )
        group.require(held <= most, sentence)
        order, expected = "".join(stage.events), "F" * most + "BF" * (m - most) + "B" * most
        group.require(order == expected, f"{group.here}{where}: the order is {order}, that of 1F1B is {expected}")


def draw(programs: list[list[str]]) -> str:
    """Draw the forwards and backwards of each rank, numbered, in their order."""
    lines = []
    for rank, events in enumerate(programs):
        counts = {"F": itertools.count(), "B": itertools.count()}
        cells = [
            Cell(f"{event}{next(counts[event])}", colour_of(rank) if event == "F" else PALE, 1 if event == "F" else 2)
            for event in events
        ]
        lines.append((f"rank {rank}", cells))
    return rows("The forwards and backwards of each rank, in their order", lines, "Waits are not drawn.")
