"""AdamW on float32 master weights, the learning-rate schedule, and the global gradient norm."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.config import Training
from picotron.weights import is_tied_replica, main_grad, parameters_and_shards


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) that reads each parameter's `main_grad`.

    A bfloat16 weight has 8 bits of precision: most updates would round to nothing. So what is optimised is a float32
    copy, the master weight, of which the model's weight is the rounding (Micikevicius et al. 2017, arXiv:1710.03740).
    Weights that are float32 or wider are their own master. Weight decay is on matrices only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], training: Training, fused: bool) -> None:
        self.masters: dict[nn.Parameter, Tensor] = {}
        for p in parameters:
            dtype = accumulation_dtype(p)
            self.masters[p] = p if p.dtype == dtype else p.detach().to(dtype).requires_grad_()
        matrices = [m for m in self.masters.values() if m.ndim >= 2]
        vectors = [m for m in self.masters.values() if m.ndim < 2]
        super().__init__(
            [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_eps,
            fused=fused,
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter, master in self.masters.items():
            master.grad = main_grad(parameter)
        super().step()
        for parameter, master in self.masters.items():
            master.grad = None  # the gradients stay where they are: in main_grad
            if master is not parameter:
                parameter.copy_(master)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The tensors beside a parameter that the next step depends on, each of its shape and in float32 or wider:
        `exp_avg` and `exp_avg_sq`, and `master` if it is not the parameter itself.
        """
        master = self.masters[parameter]
        state = {name: self.state[master][name] for name in ("exp_avg", "exp_avg_sq")}
        return state if master is parameter else state | {"master": master}

    @torch.no_grad()
    def restore(self, step: int, read: Callable[[nn.Parameter, str, Tensor], None]) -> None:
        """Go on after so many steps.

        Args:
            read: `read(parameter, name, tensor)` fills in the tensor that `state_of` calls so.
        """
        for group in self.param_groups:
            for master in group["params"]:
                device = master.device if group["fused"] else "cpu"  # as in torch's own first step
                self.state[master] = {"step": torch.tensor(float(step), dtype=torch.float32, device=device)}
                self.state[master] |= {name: torch.empty_like(master) for name in ("exp_avg", "exp_avg_sq")}
        for parameter in self.masters:
            for name, tensor in self.state_of(parameter).items():
                read(parameter, name, tensor)

    def zero_grad(self, set_to_none: bool = False) -> None:
        for parameter in self.masters:
            main_grad(parameter).zero_()


def learning_rate_factor(training: Training) -> Callable[[int], float]:
    """The fraction of `learning_rate` at step 0, 1, 2, ...: a linear warm-up, then down to `min_lr_ratio`.

    The warm-up's first step is not 0 (it would be wasted), and the last step's factor is just above `min_lr_ratio`,
    which is reached at `total_train_steps`. Cosine: Loshchilov and Hutter 2016, arXiv:1608.03983.
    """
    warmup, total, low = training.warmup_steps, training.total_train_steps, training.min_lr_ratio
    shapes = {
        "constant": lambda done: 1.0,
        "linear": lambda done: low + (1 - low) * (1 - done),
        "cosine": lambda done: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)),
    }

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return shapes[training.lr_scheduler](min(1.0, (step - warmup) / (total - warmup)))

    return factor


def make_scheduler(optimizer: torch.optim.Optimizer, training: Training, step: int = 0) -> LambdaLR:
    """The schedule after so many steps."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, learning_rate_factor(training), last_epoch=step - 1)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float | None) -> Tensor:
    """Scale all `main_grad`s by min(1, max_norm / norm) and return the norm before that, a scalar on the device.

    It is the norm of the whole model's gradients as one vector, in float32 or wider: what several ranks hold alike
    counts once. None never clips.
    """
    grid = pgm.process_group_manager
    gradients, replicas = [], []
    for name, parameter, shard in parameters_and_shards(model):
        if not is_tied_replica(model, name):
            gradients.append(main_grad(parameter))
            replicas.append(grid.tp_world_size if shard is None else shard.replicas)
    norms = torch._foreach_norm(gradients)
    torch._foreach_div_(norms, [math.sqrt(count) for count in replicas])  # Python numbers: nothing waits for the GPU
    square = torch.stack(norms).square().sum()
    all_reduce(square, grid.tp_group)
    all_reduce(square, grid.pp_group)
    norm = square.sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([main_grad(parameter) for parameter in model.parameters()], scale)
    return norm
