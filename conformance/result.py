"""What an adapter returns on each rank: numbers, and the parts of tensors that the rank holds."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


class NotOffered(Exception):
    """Raised by an adapter whose trainer does not support a case. The message is the reason."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a tensor that a rank holds: a box of it, or consecutive elements of the flattened tensor.

    Args:
        tensor: the part.
        start: place of its first element, one number for each dimension; for a flat part, one number.
    """

    tensor: Tensor
    start: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of another tensor, or raise IndexError if that has no such part."""
        if len(self.start) < whole.ndim and self.tensor.ndim == 1:
            whole = whole.flatten()
        found = whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.tensor.shape, strict=False))]
        if len(self.start) != whole.ndim or found.shape != self.tensor.shape:
            raise IndexError(f"a part of shape {list(self.tensor.shape)} at {list(self.start)} of {list(whole.shape)}")
        return found


Tensors = Mapping[str, Tensor | Part]


@dataclasses.dataclass
class Result:
    """The numbers of a rank. A rank leaves out those it does not have, as the loss before the last pipeline stage.

    Args:
        losses: loss of each step's global batch.
        grad_norms: norm of all gradients of each step, before clipping.
        gradients: gradients of each step before clipping, by transformers' names of the parameters: whole tensors,
            DTensors or `Part`s. Those of the first step suffice, also without a sequence; an adapter without access to
            gradients leaves them out.
        weights: weights after the last step, in the same form; with mixed precision, the master weights. The bias of a
            router (dots1) is one of them, though transformers has it as a buffer. An adapter that writes a model folder
            to `case.output` can leave them out.
        evaluations: loss of the evaluation batch after each step.
        tokens: new tokens of each prompt.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    gradients: Sequence[Tensors] = ()
    weights: Tensors = dataclasses.field(default_factory=dict)
    evaluations: list[float] = dataclasses.field(default_factory=list)
    tokens: Sequence[Sequence[int]] = ()

    def local(self) -> "Result":
        """Return the same with plain tensors only, on the CPU."""
        given: Any = self.gradients
        given = [given] if isinstance(given, Mapping) else given  # of the first step
        *gradients, weights = ({name: as_part(x) for name, x in each.items()} for each in (*given, self.weights))
        return dataclasses.replace(self, gradients=gradients, weights=weights)


def as_part(value: Tensor | Part) -> Part:
    """Return the part of a tensor that this rank holds.

    Raises:
        ValueError: a DTensor holds partial sums, which are no part of a tensor.
    """
    if isinstance(value, Part):
        return Part(value.tensor.detach().cpu().clone(), value.start)
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"a DTensor has placements {value.placements}, but partial sums cannot be compared")
        if any(isinstance(placement, _StridedShard) for placement in value.placements):  # it can be in several pieces
            return as_part(value.full_tensor())
        _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        return Part(value.to_local().detach().cpu().clone(), tuple(start))
    return Part(value.detach().cpu().clone(), (0,) * value.ndim)


def write_outcome(path: Path, kind: str, what: Any) -> None:
    """Write the outcome of a rank: numbers and places in JSON, in the header of a safetensors file with the tensors. To
    read such a file runs no code, whoever has written it.

    Args:
        kind: `result`, `not offered` or `crashed`.
        what: the fields of a `Result`, or the reason.
    """
    tensors = dict[str, Tensor]()

    def encoded(x: Any) -> Any:
        if not isinstance(x, Part):
            return x.tolist()  # a number of torch or numpy
        tensors[str(len(tensors))] = x.tensor.contiguous()
        return {"tensor": str(len(tensors) - 1), "start": x.start}

    text, partial = json.dumps([kind, what], default=encoded), path.with_suffix(".part")
    save_file(tensors, partial, {"outcome": text})
    partial.rename(path)  # so that it is complete when it is there


def kind_of(path: Path) -> str:
    """Return the kind of a rank's outcome."""
    with safe_open(path, "pt") as file:
        kind: str = json.loads(file.metadata()["outcome"])[0]
    return kind


def read_outcome(path: Path) -> tuple[str, Any]:
    """Read the outcome of a rank, see `write_outcome`."""
    with safe_open(path, "pt") as file:

        def decoded(x: dict[str, Any]) -> Any:
            return Part(file.get_tensor(x["tensor"]), tuple(x["start"])) if x.keys() == {"tensor", "start"} else x

        kind, what = json.loads(file.metadata()["outcome"], object_hook=decoded)
    if kind not in ("result", "not offered", "crashed") or (kind != "result" and not what):
        raise ValueError(f"{kind!r} without a result or a reason")
    return kind, Result(**what) if kind == "result" else str(what)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
