"""A step on a whole batch, for pipelines of any modules, as `torch.distributed.pipelining` has it:

    step = WholeBatchStep(build("1f1b", 2, 4), model, device, F.mse_loss, dims={"mask": None})
    output = step(x, mask=mask, target=y, losses=losses)

Every rank of the pipeline passes the same batch, of which each stage gets its micro-batches.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from picotron.console import UserError
from workbench.pipelines.engine import BatchList
from workbench.pipelines.executor import Executor
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import forward_only

# Names of arguments that `Pipeline.forward` and its stages' messages have.
RESERVED = {"hidden_states", "stage", "micro_batch", "args", "inputs", "loss"}


class WholeBatchStep:
    """A training step, or an evaluation, that cuts a batch into the micro-batches of a schedule, and joins the outputs.

    Args:
        schedule: that of the pipeline, or one with forwards only, see `forward_only`.
        model: a `Pipeline` in a `DataParallel`.
        device: where messages arrive.
        loss_fn: function of the last stage's output and of a micro-batch's `target`, which returns its mean loss; None:
            the step has only forwards.
        dims: for arguments by name, or by place, the dimension along which they are cut; None for one that all
            micro-batches get whole. By default, tensors are cut along dimension 0, and others are not cut.
        output_dim: dimension along which outputs are joined.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: Any,
        device: torch.device,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        dims: Mapping[str | int, int | None] | None = None,
        output_dim: int = 0,
    ) -> None:
        if loss_fn is None:
            schedule = forward_only(schedule.pp, schedule.micro_batches, schedule.chunks, schedule.placement)
        self.executor, self.model, self.device, self.loss_fn = Executor(schedule), model, device, loss_fn
        self.dims, self.output_dim, self.micro_batches = dims or {}, output_dim, schedule.micro_batches

    def __call__(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the step.

        Args:
            args: arguments of the first stage.
            kwargs: arguments of every stage.
            target: see `loss_fn`.
            losses: list that gets the loss of each micro-batch on the rank with the last stage.

        Returns:
            The outputs of the last stage, with their tensors joined, on its rank; None on the others.

        Raises:
            UserError: `losses` is no list, an argument has a name of `RESERVED`, or cannot be divided evenly, so that
                the mean of the losses would not be that of the batch.
        """
        if taken := RESERVED & kwargs.keys():
            raise UserError(f"the pipeline itself has an argument {min(taken)!r}; rename that of the stages")
        if losses is not None and not isinstance(losses, list):
            raise UserError(
                f"losses should be a list, which gets the loss of each micro-batch, not {type(losses).__name__}"
            )
        outputs: dict[int, Any] = {}  # by micro-batch
        found: dict[int, Tensor] = {}

        def loss(i: int, output: Any) -> Tensor:
            outputs[i] = tree_map_only(Tensor, torch.detach, output)
            if self.loss_fn is None:
                return torch.zeros(())
            value = self.loss_fn(output, targets[i])
            found[i] = value.detach()
            return value

        places = [self.cut(number, value) for number, value in enumerate(args)]
        names = {name: self.cut(name, value) for name, value in kwargs.items()}
        targets = self.cut("target", target)
        batches = [
            {name: each[i] for name, each in names.items()}
            | {"inputs": [each[i] for each in places], "loss": functools.partial(loss, i)}
            for i in range(self.micro_batches)
        ]
        self.executor(self.model, BatchList(batches), self.device)
        if losses is not None:
            losses[:] = [found[i] for i in sorted(found)]
        if not outputs:
            return None
        return tree_map(self.joined, *(outputs[i] for i in sorted(outputs)))

    def joined(self, *parts: Any) -> Any:
        """Join what all micro-batches have at one place of their outputs."""
        first, *others = parts
        if isinstance(first, Tensor):
            return torch.cat(parts, self.output_dim) if first.ndim > 0 else torch.stack(parts)
        if isinstance(first, int | float | str | None) and all(other == first for other in others):
            return first
        raise UserError(
            f"the last stage returns {first!r}, which cannot be joined; use tensors, or tuples, lists or dictionaries of them"
        )

    def cut(self, name: str | int, value: Any) -> list[Any]:
        """Return the parts of an argument for the micro-batches."""
        dim = self.dims.get(name, 0 if isinstance(value, Tensor) and value.ndim > 0 else None)
        if dim is None:
            return [value] * self.micro_batches
        if value.size(dim) % self.micro_batches:
            raise UserError(
                f"argument {name!r} has {value.size(dim)} elements in dimension {dim}, which cannot be divided into "
                f"{self.micro_batches} micro-batches; use a multiple, or dims={{{name!r}: None}} if all of them get it whole"
            )
        return list(value.tensor_split(self.micro_batches, dim))
