"""The ranks of a puzzle: real processes, connected by gloo. Their messages are counted, and mistakes are explained."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from puzzles.report import Misuse, Wrong, kind
from puzzles.tensors import difference

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def not_a_tensor(operation: str, x: Any) -> Misuse:
    """Return the error of an operation whose argument is no tensor in float64: what x is, and how to make one of it."""
    got, remedy = kind(x), ""
    if isinstance(x, Tensor):
        remedy = "; use x.double()"
    elif isinstance(x, torch.return_types.max | torch.return_types.min):
        remedy = "; use x.max(dim).values or x.amax(dim)"
    elif isinstance(x, int | float):
        remedy = f"; for a number: torch.tensor({x!r}, dtype=torch.float64)"
    elif x is None:
        got, remedy = "None", "; x.grad is None unless x.requires_grad_() was called before x was used"
    return Misuse(f"{operation} takes a tensor in float64, but got {got}{remedy}")


def fresh(argument: Any) -> Any:
    """Return a copy of a tensor, without its graph, and anything else as it is."""
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().clone().requires_grad_(argument.requires_grad)


class Group:
    """n ranks that communicate. Collectives are called by all ranks in the same order, on tensors of equal shapes in
    float64. They return a new tensor and leave their argument unchanged. Autograd does not see them. Each docstring has
    the call of torch.distributed, which writes into a tensor that the caller has allocated.

    Args:
        rank: number of this rank, 0 to n - 1.
        size: n.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group  # None: all ranks
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._forbidden: tuple[str, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self.sent = 0.0
        self._sent_to, self._received = Counter[int](), Counter[int]()  # messages, by the other rank
        self._pending: list[Any] = []
        self.log: list[tuple[int, int]] = []  # of each message: receiver, and numbers

    # For the learner's code:

    def all_reduce(self, x: Tensor, operation: str = "sum") -> Tensor:
        """Return the sum (or with "max", the maximum) of all ranks' x, element by element.
        In torch: dist.all_reduce(x), in place.
        """
        if operation not in OPERATIONS:
            raise Misuse(f'all_reduce computes "sum" or "max", not {operation!r}')
        x = self._checked(f"all_reduce ({operation})", x).clone()
        dist.all_reduce(x, OPERATIONS[operation], self._group)
        self.sent += 2 * x.numel() * (self.size - 1) / self.size
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, one after the other along the first dimension: (k, ...) -> (n k, ...).
        In torch: dist.all_gather(shards, x), with a list of n empty tensors like x.
        """
        x = self._checked("all_gather", x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, self._group)
        self.sent += x.numel() * (self.size - 1)
        return torch.cat([part.reshape(-1, *x.shape[1:]) for part in parts])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return part `rank` of the sum of all ranks' x, which is cut into n equal parts along the first dimension:
        (n k, ...) -> (k, ...). In torch: dist.reduce_scatter(part, list(x.chunk(n))), with an empty tensor part.
        """
        x = self._checked("reduce_scatter", x)
        if x.ndim == 0 or len(x) % self.size:
            raise Misuse(f"reduce_scatter cuts its argument into {self.size} equal parts, so it cannot be {kind(x)}")
        whole = x.clone()
        dist.all_reduce(whole, group=self._group)
        self.sent += x.numel() * (self.size - 1) / self.size
        return whole.chunk(self.size)[self.rank].clone()

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to a rank. Returns immediately; x may be changed afterwards.
        In torch: work = dist.isend(x, to), after which x may be changed only when work.wait() has returned.
        """
        x = self._message("send", x, to).clone()
        header = torch.tensor([x.ndim, *x.shape, *[0] * (7 - x.ndim)])
        self._pending += [header, dist.isend(header, to), x, dist.isend(x.reshape(-1), to)]
        self._sent_to[to] += 1
        self.sent += x.numel()
        self.log.append((to, x.numel()))

    def recv(self, source: int) -> Tensor:
        """Wait for the next tensor that a rank sends to this one, and return it.
        In torch: dist.recv(x, source), with an empty tensor x of the same shape.
        """
        self._other("recv", source)
        header = torch.empty(8, dtype=torch.int64)
        dist.recv(header, source)
        x = torch.empty(header[1 : 1 + int(header[0])].tolist(), dtype=torch.float64)
        flat = x.view(-1)
        dist.recv(flat, source)
        self._received[source] += 1
        return x

    # For the checks:

    def forbid(self, *operations: str) -> None:
        """Let these functions raise Misuse: the puzzle must be solved without them."""
        self._forbidden = operations

    def call(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """Call the learner's function on all ranks, with copies of tensors. Returns its result and how many numbers
        this rank has sent, if collectives use a ring.

        Raises:
            Misuse: the ranks called different collectives, or a message was not received.
        """
        self._begin()
        result = function(*map(fresh, arguments))
        self._agree("has returned")
        problem = ""
        for to, counts in enumerate(self.gather(self._received)):
            if self._sent_to[to] > counts[self.rank]:
                counted = f"{self._sent_to[to]} sent by rank {self.rank}, {counts[self.rank]} received by rank {to}"
                problem = f"a message was not received: {counted}"
        if first := next(filter(None, self.gather(problem)), ""):
            raise Misuse(first)
        return result, self.sent

    def expect(
        self,
        result: Any,
        expected: Any,
        where: str,
        name: str | tuple[str, ...] = "result",
        tolerance: float = 1e-9,
        mistakes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Raise Wrong on all ranks if a result of any rank differs.

        Args:
            mistakes: results of known mistakes, by what they are. The sentence names the one that the result equals.
        """
        found = difference(result, expected, name, tolerance)
        if found:
            kinds = (kind for kind, wrong in mistakes.items() if not difference(result, wrong, name, tolerance))
            found = "; ".join([found, *itertools.islice(kinds, 1)])
        self.require(not found, f"{self.here}{where}: {found}")

    def require(self, condition: bool, sentence: str) -> None:
        """Raise Wrong on all ranks, with the sentence of the first rank on which a condition does not hold."""
        if first := next(filter(None, self.gather("" if condition else sentence)), ""):
            raise Wrong(first)

    @property
    def here(self) -> str:
        return f"rank {self.rank} of {self.size}, " if self.size > 1 else ""

    def gather(self, value: Any) -> list[Any]:
        """Return a value of each rank, on all ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, self._group)
        return values

    def _agree(self, call: str) -> None:
        """Raise Misuse on all ranks if not all of them do the same."""
        calls = self.gather(call)
        if different := next((rank for rank, other in enumerate(calls) if other != calls[0]), None):
            raise Misuse(
                f"rank 0 {calls[0]}, but rank {different} {calls[different]}; all ranks must call the same collectives, "
                "in the same order and on equal shapes"
            )

    def _allow(self, operation: str) -> None:
        if operation in self._forbidden:
            raise Misuse(f"solve this puzzle without group.{operation}")

    def _checked(self, operation: str, x: Any) -> Tensor:
        self._allow(operation.split()[0])
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            raise not_a_tensor(operation, x)
        if operation == "all_gather" and x.ndim == 0:
            raise Misuse(
                "all_gather joins tensors along their first dimension, so it cannot take a number; use x[None]"
            )
        self._agree(f"calls {operation} of shape {tuple(x.shape)}")
        return x.detach().contiguous()

    def _message(self, operation: str, x: Any, other: int) -> Tensor:
        self._other(operation, other)
        if not isinstance(x, Tensor) or x.dtype != torch.float64 or x.ndim > 7:
            raise not_a_tensor(operation, x)
        return x.detach().contiguous()

    def _other(self, operation: str, other: Any) -> None:
        self._allow(operation)
        if isinstance(other, bool) or not isinstance(other, int) or not 0 <= other < self.size or other == self.rank:
            raise Misuse(
                f"{operation} on rank {self.rank} takes the number of another rank, 0 to {self.size - 1}, but got {other!r}"
            )
