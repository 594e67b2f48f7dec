"""Recorder of a run's tensors: inputs, outputs and weights of all modules, and their gradients, by hooks of torch.

The same recorder observes the reference and the ranks of a trainer. It needs nothing of either but modules with names.
"""

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from conformance.case import Case

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclasses.dataclass(eq=False)
class Values:
    """A tensor in float64, as it was when a module got or returned it, and its gradient. Its records share them."""

    x: Tensor
    grad: Tensor | None = None
    task: int = -1  # of autograd, which computed the gradient


@dataclasses.dataclass
class Record:
    """A tensor of a module.

    Args:
        step: the step, from 0: that of the last batch that was asked for.
        epoch: number of updates of the weights before it.
        call: number of the outermost call of a module, within which it was recorded.
        name: the trainer's name of the module.
        kind: `input`, `output`; `weight`, `bias` before the step; or `clipped weight`, `clipped bias` for the gradient
            that the optimizer gets.
        again: whether backward computed it again (activation checkpointing).
    """

    step: int
    call: int
    name: str
    kind: str
    values: Values
    again: bool
    epoch: int = 0


class Recorder:
    """Records the modules that are called in a `with` block.

    Attributes:
        records: the records, in order of execution.
        reason: why there are none, if the recorder knows it.
    """

    def __init__(self) -> None:
        self.records, self.reason = list[Record](), ""
        self.parents: dict[nn.Module, list[nn.Module]] = {}
        self.names: dict[nn.Module, str] = {}
        self.parameters: dict[nn.Parameter, tuple[str, str]] = {}
        self.known: dict[tuple[int, int], tuple[Tensor, Values]] = {}  # the tensors of this outermost call
        self.depth, self.call, self.step, self.epoch = 0, -1, -1, 0
        self.weighed, self.versions = set[tuple[int, int, nn.Module]](), dict[nn.Parameter, int]()

    def __enter__(self) -> "Recorder":
        recorder, self.batch = self, Case.batch

        def batch(case: Case, step: int) -> Any:
            recorder.step = step
            return recorder.batch(case, step)

        Case.batch = batch  # type: ignore[method-assign, assignment]
        self.handles = [
            hooks.register_module_module_registration_hook(self.adopt),
            hooks.register_module_forward_pre_hook(self.enter),
            hooks.register_module_forward_hook(self.leave, always_call=True),
            register_optimizer_step_pre_hook(self.update),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        Case.batch = self.batch  # type: ignore[method-assign]
        for handle in self.handles:
            handle.remove()
        self.known.clear()

    def adopt(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.parents.setdefault(child, []).append(parent)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.depth == 0:
            self.call += 1
            self.name_modules(self.root_of(module))
            if self.is_on():
                self.epoch += any(p._version != version for p, version in self.versions.items())
                self.versions = {p: p._version for p in self.parameters}
                self.weigh()
        self.depth += 1
        if module in self.names:  # here, before its own hooks: they can make a DTensor with a gradient of its own
            self.record(self.names[module], "input", inputs)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.depth -= 1
            if self.depth == 0:
                self.known.clear()

    def is_on(self) -> bool:
        return self.step >= 0 and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def root_of(self, module: nn.Module) -> nn.Module:
        """Return the largest module that contains a module: a trainer may call its layers one by one. Of equal ones,
        which contain each other, it is the first.
        """
        found, waiting = dict.fromkeys([module]), [module]
        while waiting:
            above = [parent for parent in self.parents.get(waiting.pop(), ()) if parent not in found]
            found |= dict.fromkeys(above)
            waiting += above
        return max(found, key=lambda each: sum(1 for _ in each.modules()))

    def name_modules(self, root: nn.Module) -> None:
        """Name the modules of a tree, and add a hook to each, after those of `parallelize_module` and `fully_shard`."""
        for full, module in root.named_modules():
            name = ".".join(part for part in full.split(".") if part not in WRAPPERS)
            if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None):
                self.reason = "torch.compile runs modules without calling them; check without it"
            # An identity can stand for a module of another stage.
            if name and module not in self.names and not isinstance(module, nn.Identity):
                self.names[module] = name
                self.parameters |= {p: (name, kind) for kind, p in module.named_parameters(recurse=False)}
                module.register_forward_hook(lambda m, i, output, name=name: self.record(name, "output", output))

    def weigh(self) -> None:
        """Record the weights, once in each step."""
        for module, name in self.names.items():
            if (now := (self.step, self.epoch, module)) not in self.weighed:
                self.weighed.add(now)
                for kind, p in module.named_parameters(recurse=False):
                    if isinstance(p, DTensor) or 0 not in p.stride():  # else its numbers are elsewhere now
                        self.add(name, kind, Values(plain(p)))

    def update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            if p in self.parameters and getattr(p.grad, "placements", None) == getattr(p, "placements", None):
                name, kind = self.parameters[p]
                self.add(name, f"clipped {kind}", Values(plain(p.grad)))

    def record(self, name: str, kind: str, found: Any) -> None:
        found = found if isinstance(found, (tuple, list)) else (found,)
        x = next((each for each in found if isinstance(each, Tensor)), None)
        if not self.is_on() or x is None or not x.ndim:
            return
        key = id(x), x._version  # operations in place change a tensor that is known
        if key not in self.known:
            values, now = Values(plain(x)), (self.step, self.epoch)
            self.known[key] = x, values
            if x.requires_grad:  # a pipeline may receive into the same leaf in every step, and its hooks stay
                x.register_hook(
                    lambda gradient: add_gradient(values, gradient) if (self.step, self.epoch) == now else None
                )
        self.add(name, kind, self.known[key][1])

    def add(self, name: str, kind: str, values: Values) -> None:
        again = torch._C._current_graph_task_id() != -1
        self.records.append(Record(self.step, self.call, name, kind, values, again, self.epoch))


def add_gradient(values: Values, gradient: Tensor) -> None:
    """Add a gradient. Backward passes that split gradients of inputs and of weights compute the same one twice."""
    found, task = plain(gradient), torch._C._current_graph_task_id()
    if values.grad is None or values.grad.shape != found.shape:
        values.grad = found
    elif task == values.task or not torch.equal(values.grad, found):
        values.grad = values.grad + found
    values.task = task


def plain(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().double().cpu().clone()


@contextlib.contextmanager
def recording(case: Case, rank: int) -> Iterator[None]:
    """Record this rank's modules into the folder `trace` of a case that has one."""
    folder = case.folder / "trace"
    if not folder.exists():
        yield
        return
    with Recorder() as recorder:
        yield
    # A trainer may ask for a batch before it takes the step. If the weights do not tell the steps, it may not.
    epochs = sorted({each.epoch for each in recorder.records})
    if len(epochs) == len(case.steps):
        for each in recorder.records:
            each.step = case.steps[epochs.index(each.epoch)]
    (folder / f"rank{rank}").write_bytes(pickle.dumps((recorder.reason, recorder.records)))


def read_records(case: Case, rank: int) -> tuple[str, list[Record]]:
    """Return why a rank of a case that this machine has run has no records, and its records."""
    found: tuple[str, list[Record]] = pickle.loads((case.folder / "trace" / f"rank{rank}").read_bytes())
    return found
