"""AdamW on float32 master weights, clipping by the global gradient norm, and the learning-rate schedule."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.config import Config, Training
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.placement import main_grad, owned_weight, placement, replicas

ReadState = Callable[[nn.Parameter, str, Tensor], None]


def version_of(parameter: Tensor) -> tuple[int, torch.UntypedStorage]:
    """Return what tells that a weight has changed: torch's count of changes in place, and where its data are."""
    return parameter._version, owned_weight(parameter).untyped_storage()


def wrapper_of(model: Any) -> DataParallel:
    """Return `model`, a `DataParallel`, perhaps compiled by torch. Raises a UserError for any other module, such as the
    one inside of it.
    """
    if not hasattr(model, "finish_grad_sync"):
        raise UserError(
            f"{type(model).__name__} has no gradients of its own: those of a wrapped module are in its data-parallel "
            f"wrapper; pass the wrapper, such as DataParallelBucket(module)"
        )
    wrapper: DataParallel = model.finish_grad_sync.__self__  # a compiled module passes on its attributes
    return wrapper


UPDATE = inspect.unwrap(torch.optim.AdamW.step)  # without hooks, which run once per step, not per bucket


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) that reads each parameter's `main_grad`.

    Parameters that do not require a gradient are frozen: the optimizer neither changes them nor has a state for them.

    A bfloat16 weight has 8 bits of precision, so rounding would cancel most of its updates. The optimizer updates a
    float32 copy instead, the master weight, and rounds it to the weight (Micikevicius et al. 2017, arXiv:1710.03740).
    Weights in float32 or wider are their own master weights. Weight decay applies to matrices only.

    A weight that something else has changed, such as `load_state_dict` or `weight.data = tensor`, is taken into the
    master weight at the next step. Changes in place of `weight.data`, which torch does not count, are lost in bfloat16.

    If the data-parallel ranks divide the optimizer (see `OwnedSlice`), master weights and moments are flat slices.

    Args:
        model: a `DataParallel`.
        training: betas, eps, learning rate and weight decay.
        fused: see torch's AdamW.

    Attributes:
        moments: names of the states of a master weight, which checkpoints store.
    """

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, model: nn.Module, training: Training, fused: bool) -> None:
        self.model = wrapper_of(model)
        vars(model)["zero_grad"] = self.model.zero_grad  # a compiled module has torch's, for `grad`
        self.masters: dict[nn.Parameter, Tensor] = {}
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            weight, dtype = owned_weight(p), self.master_dtype(p)
            self.masters[p] = weight if weight.dtype == dtype else weight.detach().to(dtype).requires_grad_()
        self.versions: dict[Tensor, Any] = {}  # of weights after their last step
        matrices = [master for p, master in self.masters.items() if p.ndim >= 2]
        vectors = [master for p, master in self.masters.items() if p.ndim < 2]
        super().__init__(
            [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            fused=fused,
        )

    def master_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is updated."""
        return accumulation_dtype(parameter)

    def moment_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's two moments."""
        return accumulation_dtype(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights, in the parts of the wrapper."""
        if closure:
            raise UserError("picotron's AdamW calls no closure; compute the gradients before `step()`")
        self.model.finish_grad_sync()
        for part in self.model.parts():
            self.update(part)

    def update(self, parameters: list[nn.Parameter]) -> None:
        """Update some of the weights."""
        parameters = [p for p in parameters if p in self.masters]
        rounded = [p for p in parameters if p.dtype != self.masters[p].dtype]
        for changed in (p for p in rounded if version_of(p) != self.versions.get(p)):
            weight, master = owned_weight(changed), self.masters[changed]
            master.copy_(torch.where(weight == master.to(weight.dtype), master, weight))
        self.update_masters(parameters)
        if rounded:
            torch._foreach_copy_([owned_weight(p) for p in rounded], [self.masters[p] for p in rounded])
        self.versions |= {p: version_of(p) for p in rounded}

    def update_masters(self, parameters: list[nn.Parameter]) -> None:
        """Update the master weights of some parameters, and their moments."""
        for parameter in parameters:
            self.masters[parameter].grad = main_grad(parameter)
        UPDATE(self)  # skips all other masters, which have no gradient
        for parameter in parameters:
            self.masters[parameter].grad = None  # the gradients stay in main_grad

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors that the next step of a parameter depends on: its `moments`, and `master` if it is not the
        weight itself. They have the shape of `owned_weight`. A frozen parameter has none, nor has any parameter before
        its first step.
        """
        master = self.masters.get(parameter)
        if master is None or not self.state.get(master):
            return {}
        state = {name: self.state[master][name] for name in self.moments}
        return state if master.dtype == parameter.dtype else state | {"master": master}

    @torch.no_grad()
    def restore(self, updates: int, read: ReadState) -> None:
        """Restore the state after a number of updates.

        Args:
            read: function that fills a tensor of `state_of`, called as `read(parameter, name, tensor)`.
        """
        for parameter, master in self.masters.items():
            self.state[master] = self.new_state(parameter, updates)
            for name, tensor in self.state_of(parameter).items():
                read(parameter, name, tensor)

    def new_state(self, parameter: nn.Parameter, updates: int) -> dict[str, Tensor]:
        """Return a state after a number of updates, with moments of 0."""
        master, dtype = self.masters[parameter], self.moment_dtype(parameter)
        device = master.device if self.param_groups[0]["fused"] else "cpu"  # where torch's AdamW keeps the number
        moments = {name: torch.zeros_like(master, dtype=dtype) for name in self.moments}
        return {"step": torch.tensor(updates, dtype=torch.float32, device=device), **moments}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the master weights that are not the weights themselves, as `master`."""
        found = super().state_dict()
        states = found["state"]
        numbers = {
            master: i for i, master in enumerate(each for group in self.param_groups for each in group["params"])
        }
        for parameter, master in self.masters.items():
            if master.dtype != parameter.dtype and numbers.get(master) in states:
                states[numbers[master]] = states[numbers[master]] | {"master": master.detach()}
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        super().load_state_dict(state_dict)
        for parameter, master in self.masters.items():
            state = self.state.get(master, {})
            if "master" in state:
                master.copy_(state.pop("master"))
            # torch has converted the moments to the dtype of the master weight
            for name, like in self.new_state(parameter, 0).items() if state else ():
                state[name] = state[name].to(like)
        self.versions = {}  # the next step compares all weights with the master weights

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients of the model to zero, see `DataParallel.zero_grad`."""
        self.model.zero_grad()


def copies(parameter: Tensor) -> int:
    """Return the number of ranks that hold the same numbers of a parameter's `main_grad`."""
    shard, owned = placement(parameter).shard, placement(parameter).owned
    on_tp_ranks = pgm.process_group_manager.tp_world_size if shard is None else shard.replicas
    return on_tp_ranks if owned else on_tp_ranks * dist.get_world_size(replicas(parameter))


def scale_gradients(model: nn.Module, factor: Tensor | float) -> None:
    """Multiply the `main_grad`s of all parameters that are not frozen by a factor, in place."""
    gradients = [main_grad(parameter) for parameter in model.parameters() if parameter.requires_grad]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def make_optimizer(model: nn.Module, config: Config) -> AdamW:
    return AdamW(model, config.training, config.model.use_fused_adam)


NORM_PART = 2**18  # elements of a gradient whose norm is computed at a time


@torch.no_grad()
def squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Compute this rank's share of the squared norm of the gradients of parameters, a scalar in float64 on the device.
    The shares of all ranks add up to the squared norm: ranks that hold the same numbers have equal shares of them, and
    a copy of a tied weight has none, nor has a frozen parameter.
    """
    parts: defaultdict[int, list[Tensor]] = defaultdict(list)  # of gradients, by the number of their copies
    for each in parameters:
        if each.requires_grad and not placement(each).is_replica:
            gradient = main_grad(each)
            # On a CPU, torch adds the squares of a float32 tensor one by one, which loses percents of a large one.
            parts[copies(each)] += gradient.flatten().split(NORM_PART) if gradient.is_cpu else [gradient]
    square = torch.zeros((), dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    for number, tensors in parts.items():
        # float64, also because stages can have different dtypes; not in place: with gloo, the 0 is on the CPU
        square = square + torch.stack(torch._foreach_norm(tensors)).double().square().sum() / number
    return square


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all `main_grad`s by min(1, max_norm / (norm + 1e-6)), as torch does, and return the norm before scaling, a
    scalar on the device.

    The norm is that of all gradients of the unsharded model as one vector, in float32 or wider: a gradient that several
    ranks hold counts once.

    Args:
        model: a `DataParallel`.
        max_norm: None computes the norm and never scales.
    """
    wrapper = wrapper_of(model)
    wrapper.finish_grad_sync()  # unless the loop has called it
    square = squared_norm(model.parameters())
    all_reduce(square, None)
    norm = square.sqrt().to(next(iter(wrapper.gradient_buffers()), square).dtype.to_real())
    if max_norm is not None:
        scale_gradients(model, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def update_weights(model: nn.Module, optimizer: AdamW, max_norm: float | None) -> Tensor:
    """Clip the gradients, update the weights and set the gradients to zero. Returns the norm, see `clip_grad_norm`."""
    norm = clip_grad_norm(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def learning_rate_factor(training: Training) -> Callable[[int], float]:
    """Return the function from the step (0, 1, 2, ...) to the fraction of `learning_rate`: a linear warm-up, then a
    decay to `min_lr_ratio`.

    The first step's fraction is not 0, which would waste the step. `min_lr_ratio` is reached after the last step, at
    `total_train_steps`: in a linear decay of n steps, the last one still has 1/n of the way to go. Cosine: Loshchilov
    and Hutter 2016, arXiv:1608.03983. WSD (warm-up, stable, decay): Hu et al. 2024, arXiv:2404.06395; until the decay
    begins, its fractions do not depend on `total_train_steps`, so that a run can be resumed with more steps.
    """
    warmup, total, low = training.warmup_steps, training.total_train_steps, training.min_lr_ratio
    start = total - training.decay if training.lr_scheduler == "wsd" else warmup
    shapes = {
        "constant": lambda progress: 1.0,
        "linear": lambda progress: low + (1 - low) * (1 - progress),
        "cosine": lambda progress: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)),
    }
    shapes["wsd"] = shapes["linear"]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return shapes[training.lr_scheduler](min(1.0, max(0.0, (step - start) / (total - start))))

    return factor


def make_scheduler(optimizer: torch.optim.Optimizer, training: Training, step: int = 0) -> LambdaLR:
    """Return the learning-rate schedule after `step` completed steps. The rates are fractions of each group's
    `initial_lr`: as with torch's schedules, the group's `lr` when its first schedule is made, unless a program sets it.
    """
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # a loaded state has it, and an "lr" that has decayed
    return LambdaLR(optimizer, learning_rate_factor(training), last_epoch=step - 1)
