"""AdamW on float32 master weights, and clipping by the global gradient norm."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.config import Config, Training
from picotron.console import UserError
from picotron.data_parallel.wrappers import complete_gradients, wrappers_of
from picotron.model.placement import main_grad, owned_weight, placement, scale_gradients

ReadState = Callable[[nn.Parameter, str, Tensor], None]


def version_of(parameter: Tensor) -> tuple[int, torch.UntypedStorage]:
    """Return what tells that a weight has changed: torch's count of changes in place, and where its data are."""
    return parameter._version, owned_weight(parameter).untyped_storage()


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
        model: a `DataParallel`, the module in it, or any module whose parameters have a `main_grad`.
        training: betas, eps, learning rate and weight decay.
        fused: see torch's AdamW.

    Raises:
        UserError: the model has only some of the parameters of a `DataParallel`.
    """

    reads_main_grad = True

    def __init__(self, model: nn.Module, training: Training, fused: bool) -> None:
        self.model, self.wrappers = model, wrappers_of(model)
        for wrapper in self.wrappers:
            if others := wrapper.trained - set(model.parameters()):
                raise UserError(
                    f"{min(wrapper.names[each] for each in others)} is in the same data-parallel wrapper, but not in the "
                    f"optimizer's model; wrap the modules of each optimizer by themselves"
                )
        self.masters: dict[nn.Parameter, Tensor] = {}
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            weight, dtype = owned_weight(p), self.master_dtype(p)
            self.masters[p] = weight if weight.dtype == dtype else weight.detach().to(dtype).requires_grad_()
        self.versions = {p: version_of(p) for p in self.masters}
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
        """Update all weights, in the parts of a `DataParallel`.

        Raises:
            UserError: the wrapper has been closed, or the data of a parameter were replaced with ZeRO.
        """
        assert closure is None
        if wrappers_of(self.model) != self.wrappers:
            raise UserError(
                "the optimizer's data-parallel wrapper has been closed, or made later; make a new optimizer"
            )
        complete_gradients(self.model)
        for wrapper in self.wrappers:
            for part in wrapper.parts():
                self.update(part)
        if not self.wrappers:
            self.update(list(self.masters))

    def update(self, parameters: list[nn.Parameter]) -> None:
        """Update some of the weights."""
        parameters = [p for p in parameters if p in self.masters]
        rounded = [p for p in parameters if p.dtype != self.masters[p].dtype]
        for changed in (p for p in rounded if version_of(p) != self.versions[p]):
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
        super().step()  # skips all other masters, which have no gradient
        for parameter in parameters:
            self.masters[parameter].grad = None  # the gradients stay in main_grad

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the tensors that the next step of a parameter depends on: `exp_avg`, `exp_avg_sq`, and `master` if it
        is not the weight itself. They have the shape of `owned_weight`. A frozen parameter has none, nor has any
        parameter before its first step.
        """
        master = self.masters.get(parameter)
        if master is None or not self.state.get(master):
            return {}
        state = {name: self.state[master][name] for name in ("exp_avg", "exp_avg_sq")}
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
        moments = {name: torch.zeros_like(master, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(updates, dtype=torch.float32, device=device), **moments}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the master weights that are not the weights themselves, as `master`."""
        found = super().state_dict()
        numbers = {
            master: i for i, master in enumerate(each for group in self.param_groups for each in group["params"])
        }
        for parameter, master in self.masters.items():
            if master.dtype != parameter.dtype and numbers[master] in found["state"]:
                found["state"][numbers[master]] = {**found["state"][numbers[master]], "master": master.detach()}
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        super().load_state_dict(state_dict)
        for parameter, master in self.masters.items():
            state = self.state.get(master, {})
            if "master" in state:
                master.copy_(state.pop("master"))
            likes = self.new_state(parameter, 0) if state else {}
            for name, like in likes.items():  # torch has converted the moments to the dtype of the master weight
                state[name] = state[name].to(like)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients of the model to zero, see `DataParallel.zero_grad`."""
        for wrapper in self.wrappers:
            wrapper.zero_grad()
        for parameter in () if self.wrappers else self.masters:
            main_grad(parameter).zero_()


def make_optimizer(model: nn.Module, config: Config) -> AdamW:
    """Return the optimizer that a config asks for. Arguments: see `AdamW`."""
    training, fused = config.training, config.model.use_fused_adam
    if training.optimizer_states == "float32":
        return AdamW(model, training, fused)
    from picotron.optimizer.bfloat16_states import BFloat16AdamW  # a variant, which no other run needs

    return BFloat16AdamW(model, training, fused)


@torch.no_grad()
def squared_norms(model: nn.Module) -> dict[str, Tensor]:
    """Complete the gradients, and return this rank's share of each one's squared norm, by the parameter's name, as
    scalars in float64 on the device.

    The shares of the tp and pp ranks add up to the squared norm; with ZeRO, the data-parallel ranks also have shares. A
    gradient that several ranks hold counts once: a copy of a tied weight has no share, and replicas have equal shares.
    """
    complete_gradients(model)
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not placement(parameter).is_replica
    }
    if not found:  # all weights of this rank are frozen, or it has none
        return {}
    tp, shards = pgm.process_group_manager.tp_world_size, [placement(parameter).shard for parameter in found.values()]
    norms = torch._foreach_norm([main_grad(parameter) for parameter in found.values()])
    # Python numbers: no wait for the GPU
    torch._foreach_div_(norms, [math.sqrt(tp if shard is None else shard.replicas) for shard in shards])
    squares = torch.stack(norms).double().square()  # float64, because stages can have different dtypes
    return dict(zip(found, squares, strict=True))


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all `main_grad`s by min(1, max_norm / (norm + 1e-6)), as torch does, and return the norm before scaling, a
    scalar on the device.

    The norm is that of all gradients of the unsharded model as one vector, in float32 or wider: a gradient that several
    ranks hold counts once.

    Args:
        max_norm: None computes the norm and never scales.
    """
    grid, shares = pgm.process_group_manager, squared_norms(model)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    square = torch.zeros((), dtype=torch.float64, device=device)
    if shares:
        square = torch.stack([*shares.values()]).sum()
    all_reduce(square, grid.tp_group)
    if any(placement(parameter).owned for parameter in model.parameters()):
        all_reduce(square, grid.cp_dp_group)
    all_reduce(square, grid.pp_group)  # last, because a stage whose weights are all frozen owns no slices
    norm = square.sqrt().to(accumulation_dtype(next(model.parameters(), square)))
    if max_norm is not None:
        scale_gradients(model, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def update_weights(model: nn.Module, optimizer: AdamW, max_norm: float | None) -> Tensor:
    """Clip the gradients, update the weights and set the gradients to zero. Returns the norm, see `clip_grad_norm`."""
    norm = clip_grad_norm(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm
