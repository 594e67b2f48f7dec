"""Random programs over a wrapped module, against the same program on the bare module with torch's AdamW.

A program is a list of operations, [name, arguments ...], each of which is a method of `Bare` and of `Wrapped`. It has
the same losses, norms and weights on both, or it is refused with a sentence.
"""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from picotron import process_group_manager as pgm
from picotron.console import UserError
from picotron.model.placement import main_grad
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.process_group_manager import setup_process_group_manager
from tests.fuzz.habits import HOOKS, Habits, drawn
from tests.fuzz.pipelines import TRAINING, WRAPPERS
from tests.support.oracle import torch_adamw

Case = dict[str, Any]
Operation = list[Any]
D = 6


# ------------------------------------------------------------------------------------------------------- the modules


class Net(nn.Module):
    """Layers in a list, of which two may share a matrix; beside it perhaps a head, a scalar and an unused layer, and
    two buffers.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D, bias=False), nn.Linear(D, D))
        if kind == "shared":
            self.layers[3].weight = self.layers[0].weight
        self.head = nn.Linear(D, 2) if kind == "outside" else None
        self.scale = nn.Parameter(torch.ones(())) if kind == "outside" else None
        self.unused = nn.Linear(2, 2) if kind != "shared" else None
        self.register_buffer("shift", torch.full((), 0.3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.layers(x + self.shift)
        return x if self.head is None else self.head(x) * self.scale


def net_of(kind: str) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(kind).double()


# ------------------------------------------------------------------------------------ losses, each with its backward

Call = Callable[[Tensor], Tensor]


def plain(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    return [call(x).square().mean()]


def two_calls(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    return [call(x).square().mean() + call(x + 1).sin().mean()]


def retained(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    return 2 * plain(call, net, x)


def metric_between(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    (loss,) = plain(call, net, x)
    with torch.no_grad():
        (metric,) = plain(call, net, x + 1)
    return [loss + metric]


def penalty(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    (loss,) = plain(call, net, x.requires_grad_())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return [loss + gradient.square().sum()]


def regularised(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    (loss,) = plain(call, net, x)
    return [loss + 0.1 * torch.stack([p.square().sum() for p in net.parameters()]).sum()]


def recomputed(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    return plain(lambda x: checkpoint(call, x.requires_grad_(), use_reentrant=False), net, x)


def functional(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    weights = {name: 0.9 * parameter for name, parameter in net.named_parameters()}
    return plain(lambda x: functional_call(net, weights, (x,)), net, x)


def one_layer(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    return plain(net.layers[0], net, x)


def routed(call: Call, net: Net, x: Tensor) -> list[Tensor]:
    return plain(net.layers[0 if x.mean() > 0 else 3], net, x)


LOSS_OF = {
    function.__name__: function
    for function in (
        *(plain, two_calls, retained, metric_between, penalty, regularised, recomputed),
        *(functional, one_layer, routed),
    )
}


# --------------------------------------------------------------------------------------------------------- both sides


class Bare(Habits):
    """The module on one process, which has the data of all ranks."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.program, self.net = program, net_of(program["net"])
        for name in program["frozen"]:
            self.freeze(name)
        self.result: dict[str, Any] = {"losses": [], "norms": []}
        self.prepare(program["engine"])

    def prepare(self, engine: str) -> None:
        self.optimizer = torch_adamw(self.net.parameters(), TRAINING)
        self.zero("optimizer")

    def second_program(self) -> dict[str, Any]:
        return self.program | {"net": "inside", "optimizer": "wrapper", "frozen": [], "engine": "bucket"}

    @property
    def ranks(self) -> list[int]:
        return list(range(self.program["ranks"]))

    @property
    def call(self) -> nn.Module:
        return self.net

    def run(self) -> dict[str, Any]:
        for name, *arguments in [*self.program["operations"], ["step"]]:
            getattr(self, name)(*arguments)
        return self.end()

    def end(self) -> dict[str, Any]:
        return self.result | {"weights": {name: p.detach().clone() for name, p in self.net.named_parameters()}}

    def backward(self, loss: str, flag: bool | None, seed: int) -> None:
        inputs = [drawn(10 * seed + rank, 3, D) for rank in self.ranks]
        found = []
        for x in inputs:
            losses = LOSS_OF[loss](self.call, self.net, x)
            for i, each in enumerate(losses):
                is_kept = any(each is later for later in losses[i + 1 :])
                (each / len(inputs)).backward(retain_graph=is_kept)
            found.append(torch.stack(losses).sum())
        self.record(found)

    def record(self, losses: list[Tensor]) -> None:
        """Record the mean of losses over the ranks."""
        self.note(self.mean(torch.stack(losses).detach().double().mean()))

    def mean(self, loss: Tensor) -> Tensor:
        return loss

    def forward(self, mode: str, seed: int) -> None:
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]():
            outputs = [self.call(drawn(10 * seed + rank, 3, D)).mean() for rank in self.ranks]
        self.record([each.clone() for each in outputs])

    def clip(self, limit: float | None) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1e9 if limit is None else limit)
        self.result["norms"].append(norm.item())

    def step(self) -> None:
        self.optimizer.step()

    def zero(self, of: str) -> None:
        for p in filter(lambda p: p.requires_grad, self.net.parameters()):
            p.grad = torch.zeros_like(p)  # weight decay reaches unused parameters, too

    def finish(self) -> None:
        pass

    def share(self, engine: str) -> None:
        pass

    def close_and_wrap(self, engine: str) -> None:
        self.prepare(engine)

    def lay_out(self, engine: str, dp: int) -> None:
        self.prepare(engine)

    def reload(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def regroup(self) -> None:
        """Let all parameters be one group."""
        groups = self.optimizer.param_groups
        groups[:] = [groups[0] | {"params": [p for p in self.net.parameters() if p.requires_grad]}]

    def load(self, seed: int) -> None:
        weights = {name: p.shape for name, p in self.net.named_parameters(remove_duplicate=False)}
        self.net.load_state_dict({name: 0.3 * drawn(seed, *shape) for name, shape in weights.items()}, strict=False)

    def assign(self, how: str, seed: int) -> None:
        parameters = list(self.net.parameters())
        values = [0.3 * drawn(seed + i, *p.shape) for i, p in enumerate(parameters)]
        if how == "vector":
            torch.nn.utils.vector_to_parameters(torch.cat([each.flatten() for each in values]), parameters)
        else:  # the data of one alone
            i = seed % len(parameters)
            parameters[i].data = values[i].to(parameters[i].dtype)

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.net.named_parameters(remove_duplicate=False))[name]

    def freeze(self, name: str) -> None:
        self.parameter(name).requires_grad_(False).grad = None

    def unfreeze(self, name: str) -> None:
        parameter = self.parameter(name).requires_grad_()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    def halve(self, name: str) -> None:
        if (parameter := self.parameter(name)).requires_grad:
            parameter.register_hook(lambda gradient: gradient / 2)


class Wrapped(Bare):
    """The module in a data-parallel wrapper, on this rank's data."""

    def prepare(self, engine: str) -> None:
        self.net.zero_grad()  # of what a recipe has put there
        self.model = WRAPPERS[engine](self.net)
        kind = self.program["optimizer"]
        if kind in ("torch", "recipe"):
            self.optimizer = torch_adamw(self.net.parameters(), TRAINING)
        else:
            self.optimizer = AdamW(self.net if kind == "module" else self.model, TRAINING, fused=False)

    @property
    def ranks(self) -> list[int]:
        grid = pgm.process_group_manager
        return list(range(self.program["ranks"]))[grid.dp_rank :: grid.dp_world_size]

    @property
    def call(self) -> nn.Module:
        return self.model

    def mean(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        return loss

    def backward(self, loss: str, flag: bool | None, seed: int) -> None:
        if flag is not None:
            self.model.require_backward_grad_sync = flag
        super().backward(loss, flag, seed)

    def clip(self, limit: float | None) -> None:
        model = self.net if self.program["optimizer"] == "module" else self.model
        self.result["norms"].append(clip_grad_norm(model, limit).item())

    def step(self) -> None:
        if self.program["optimizer"] == "recipe":  # that of the error about torch's optimizers
            self.model.finish_grad_sync()
            for p in filter(lambda p: p.requires_grad, self.net.parameters()):
                if main_grad(p).shape != p.shape:
                    raise UserError("with ZeRO, main_grad is a slice")
                p.grad = main_grad(p)
        super().step()

    def zero(self, of: str) -> None:
        if any(map(math.isnan, self.result["losses"])):
            self.step()  # with ZeRO-3, of weights that were read outside of their module: it must not train
        if self.program["optimizer"] == "recipe" and of != "only optimizer":  # which the error's sentence asks for
            of = "wrapper"
        {"wrapper": self.model, "module": self.net}.get(of, self.optimizer).zero_grad()

    def finish(self) -> None:
        self.model.finish_grad_sync()

    def share(self, engine: str) -> None:
        WRAPPERS[engine](nn.Sequential(self.net.layers[0]))

    def close_and_wrap(self, engine: str) -> None:
        self.model.close()
        self.prepare(engine)

    def lay_out(self, engine: str, dp: int) -> None:
        """Go on in a layout of other sizes, in which tp ranks have the same data."""
        self.model.close()
        dp = min(dp, self.program["ranks"])
        setup_process_group_manager(self.program["ranks"] // dp, 1, 1, dp)
        self.prepare(engine)

    def unfreeze(self, name: str) -> None:
        self.parameter(name).requires_grad_()

    def assign(self, how: str, seed: int) -> None:
        try:
            super().assign(how, seed)
        except RuntimeError as error:
            if "more than one element of the written-to tensor" not in str(error):  # torch's words for a freed weight
                raise
            raise UserError(str(error)) from error

    def end(self) -> dict[str, Any]:
        self.model.close()
        return super().end()


def run_program(case: Case) -> dict[str, Any]:
    """Run a program on this rank."""
    setup_process_group_manager(1, 1, 1, case["program"]["ranks"])
    return Wrapped(case["program"]).run()


def expected_of_program(case: Case) -> dict[str, Any]:
    """Run the program on the bare module, on one process.

    Raises:
        UserError: torch refuses the program.
    """
    try:
        return Bare(case["program"]).run()
    except RuntimeError as error:
        raise UserError(f"torch: {error}") from error


# ------------------------------------------------------------------------------------------------------------ drawing

NAMES = ("layers.0.weight", "layers.0.bias", "layers.2.weight")


def draw_program(dice: random.Random) -> Case:
    """Draw a program of a few steps, in which something unusual happens now and then."""
    operations: list[Operation] = []
    for _ in range(dice.randint(2, 4)):
        operations += ([draw_event(dice)] if dice.random() < 0.4 else []) + draw_step(dice)
    return {
        "ranks": dice.choice((1, 2)),
        "engine": dice.choice(list(WRAPPERS)),
        "net": dice.choice(("inside", "outside", "shared")),
        "optimizer": dice.choice(("wrapper",) * 8 + ("module", "torch", "recipe", "recipe")),
        "frozen": [dice.choice(NAMES)] if dice.random() < 0.15 else [],
        "operations": operations,
    }


def draw_step(dice: random.Random) -> list[Operation]:
    """Draw a step: backwards, perhaps with forwards between them, and an update."""
    count, flags = dice.randint(1, 3), dice.choice(("last",) * 5 + ("first", False, True, None))
    losses = [*LOSS_OF][:-1]  # with ZeRO-3, ranks cannot be `routed` to other layers
    found: list[Operation] = []
    for i in range(count):
        forward = ["forward", dice.choice(("no_grad", "inference", "grad")), dice.randrange(100)]
        loss = "plain" if dice.random() < 0.6 else dice.choice(losses)
        flag = {"first": i == 0, "last": i == count - 1}.get(flags, flags)
        found += [forward] * (dice.random() < 0.2) + [["backward", loss, flag, dice.randrange(100)]]
    found += [["finish"]] * dice.choice((0, 0, 1, 2)) + [["forward", "no_grad", 7]] * (dice.random() < 0.2)
    found += [["clip", dice.choice((None, 0.1))]] * (dice.random() < 0.7)
    zero = ["zero", dice.choice(("optimizer", "optimizer", "wrapper", "module"))]
    return found + [["step"]] * (dice.random() < 0.9) + [zero] * (dice.random() < 0.95)


def draw_event(dice: random.Random) -> Operation:
    engine, seed, name = dice.choice(list(WRAPPERS)), dice.randrange(100), dice.choice(NAMES)
    events: list[Operation] = [
        [dice.choice(("share", "close_and_wrap")), engine],
        ["lay_out", engine, dice.choice((1, 2))],
        ["reload"],
        ["rate", 0.5],
        ["regroup"],
        ["load", seed],
        ["assign", dice.choice(("data", "vector")), seed],
        [dice.choice(("freeze", "unfreeze", "halve")), name],
        ["average"],
        ["twin", dice.choice(("copied", "copied", "wrapped")), seed],
        ["hook", dice.choice(list(HOOKS))],
        ["count_steps"],
        ["compute", dice.choice(("pruned", "parametrized"))],
        ["fails", dice.choice(("forward", "backward")), seed],
        ["second", seed],
        ["zero_late", seed],
    ]
    return dice.choice(events)
