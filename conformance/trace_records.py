"""Records of the reference and of the ranks, brought into one form: tokens of the global batch by columns.

A rank need not say which tokens it holds, nor in which order: its numbers do.
"""

import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.trace_places import alike, columns_of_most, find_columns, settle
from conformance.trace_recorder import Record, Values

Key = tuple[int, str, str]  # step, the reference's name of a module, kind of record
ACTIVATIONS = ("input", "output")
Layout = tuple[Tensor, tuple[int, ...]]  # tokens of a tensor, and its dimensions of tokens: (B, T), (T, B) or (n)


@dataclasses.dataclass
class Right:
    """A record of the reference: an activation (tokens of the global batch, columns), or a weight.

    Args:
        order: number of the record, in order of execution.
        made: number of the first record of this tensor; a smaller one was computed earlier.
        is_path: whether all that was computed before can only act through it: the input of a matrix.
        is_shared: whether all rows of the batch have the same.
    """

    value: Tensor
    grad: Tensor | None
    order: int
    made: int
    is_path: bool = False
    is_shared: bool = False


@dataclasses.dataclass(eq=False)
class Local:
    """A record of a rank.

    Args:
        again: whether backward computed it again.
        is_known: whether it can be compared; not if nothing says which tokens some columns of it belong to.
        forward: number of the forward pass, or part of one, of which all records have the same tokens.
        x: the activation as (tokens, columns), and `dx` its gradient.
        tokens: the places of its tokens in the global batch; None: unknown.
        columns: its columns among those of the reference, once its value is known to be right: (c, C).
    """

    rank: int
    key: Key
    values: Values
    again: bool = False
    is_known: bool = True
    forward: int = 0
    x: Tensor | None = None
    dx: Tensor | None = None
    tokens: Tensor | None = None
    columns: Tensor | None = None
    verdicts: dict[bool, str] = dataclasses.field(default_factory=dict)


class Records:
    """The records of a case.

    Args:
        case: the case, whose ranks have written theirs.
        right: records of the reference.
        rename: the adapter's function of a module's name, which returns the name of transformers' module, or a tuple of
            names if the module computes what several modules of transformers do.

    Attributes:
        right: the reference's tensors.
        at: the ranks' records of each of them.
        forwards: the ranks' records of each forward pass, by rank and number.
        first: the first record of each tensor, by the id of its `Values`.
        modules: names of the reference's modules.
        raw: the trainer's names of its modules.
        reason: why a rank has no records, if it says so.
    """

    def __init__(self, case: Case, right: list[Record], rename: Callable[[str], Any]) -> None:
        self.case, self.rename = case, rename
        self.shape = tuple(case.batch(case.first_step)["input_ids"].shape)
        self.right, self.modules, self.raw, self.reason = dict[Key, Right](), set[str](), set[str](), ""
        self.at: dict[Key, list[Local]] = {}
        self.forwards: dict[tuple[int, int], list[Local]] = {}
        self.first: dict[int, Local] = {}
        self.read_reference([each for each in right if each.step >= case.first_step])
        for rank in range(case.world_size):
            for each in self.read(rank):
                self.at.setdefault(each.key, []).append(each)
                self.first.setdefault(id(each.values), each)
                if each.key[2] in ACTIVATIONS:
                    self.forwards.setdefault((rank, each.forward), []).append(each)
        layouts = [self.layouts(found) for found in self.forwards.values()]
        others: dict[tuple[int, int], list[Layout]] = {}
        for own, found in zip(layouts, self.forwards.values(), strict=True):
            for n, layout in own.items():
                others.setdefault((found[0].key[0], n), []).append(layout)
        for own, found in zip(layouts, self.forwards.values(), strict=True):
            self.find_tokens(found, own | self.gathered(found, own, others))
        for step in case.steps:
            self.keep_order(step)

    def read_reference(self, records: list[Record]) -> None:
        first = dict[int, int]()
        matrices = {each.name for each in records if each.kind == "weight" and each.values.value.ndim == 2}
        for i, each in enumerate(records):
            key, value, grad = (each.step, each.name, each.kind), each.values.value, each.values.grad
            made = first.setdefault(id(each.values), i)
            if each.kind not in ACTIVATIONS:
                self.right[key] = Right(value, grad, i, made)
            elif (flat := self.in_order(value, each.step)) is not None:
                shared = value.size(0) == 1 < self.shape[0]
                path = each.kind == "input" and each.name in matrices
                rows = None if grad is None else self.in_order(grad, each.step)
                self.right[key] = Right(flat, rows, i, made, path, shared)
        self.modules = {name for _, name, kind in self.right if kind in ACTIVATIONS}

    def in_order(self, x: Tensor, step: int) -> Tensor | None:
        """Bring an activation of the reference (rows, tokens, ...) into the order of the batch: (tokens, columns)."""
        batch = self.case.batch(step)
        if x.ndim < 2:
            return None
        if "document_ids" in batch:  # each document was a row of its own, padded
            lengths = [
                n for row in batch["document_ids"] for n in row.unique_consecutive(return_counts=True)[1].tolist()
            ]
            if x.size(1) != max(lengths) or x.size(0) not in (1, len(lengths)):
                return None
            x = x.expand(len(lengths), *x.shape[1:])
            rows = [row[:n] for row, n in zip(x, lengths, strict=True)]
            return torch.cat(rows).reshape(math.prod(self.shape), -1)
        if x.size(1) != self.shape[1] or x.size(0) not in (1, self.shape[0]):
            return None
        return x.expand(self.shape[0], *x.shape[1:]).reshape(math.prod(self.shape), -1)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the reference's names of a module: those that end as its own does, or as the adapter says."""
        given = self.rename(name)
        found = []
        for each in (given,) if isinstance(given, str) else given:
            parts = each.split(".")
            ends = [".".join(parts[i:]) for i in range(len(parts))]
            found += [end for end in (*ends, f"model.{each}") if end in self.modules][:1]
        return tuple(found)

    def right_of(self, key: Key, names: tuple[str, ...]) -> Right | None:
        """Return the reference's tensor of a module; of one that stands for several: all of their columns."""
        parts = [self.right[k] for name in names if (k := (key[0], name, key[2])) in self.right]
        if key not in self.right and len(parts) == len(names) > 1:
            if key[2] == "input":
                self.right[key] = dataclasses.replace(parts[0])
            else:
                dim = 1 if key[2] == "output" else 0
                grads = [each.grad for each in parts if each.grad is not None]
                grad = torch.cat(grads, dim) if len(grads) == len(parts) else None
                value = torch.cat([each.value for each in parts], dim)
                self.right[key] = Right(value, grad, parts[-1].order, parts[-1].made)
        return self.right.get(key)

    def read(self, rank: int) -> Iterator[Local]:
        """Yield the records of a rank that the reference has, and number its forward passes."""
        reason, records = pickle.loads((self.case.folder / "trace" / f"rank{rank}").read_bytes())
        self.reason = self.reason or reason
        forward, call, last = 0, -1, -1
        for record in records if not reason else ():
            self.raw.add(record.name)
            names = self.names_of(record.name)
            key = record.step, " + ".join(names), record.kind
            right = self.right_of(key, names) if names else None
            if right is None:
                continue
            if record.kind in ACTIVATIONS:
                # A trainer that calls the layers one by one begins a new forward where the order goes back.
                forward += record.call != call and (not record.is_part or record.again or right.order <= last)
                call, last = record.call, right.order
            yield Local(rank, key, record.values, record.again, forward=forward)

    def layouts(self, found: list[Local]) -> dict[int, Layout]:
        """Find the tokens of a forward pass, for each number of tokens that its tensors have: by the tensor that tells
        most of them apart.
        """
        length, tables = self.shape[1], dict[int, list[tuple[int, int, Tensor, tuple[int, ...]]]]()

        asked = dict[int, tuple[Tensor, Tensor]]()

        def best(n: int) -> Tensor:
            return settle([cells for *_, cells, _ in tables[n]], tables[n][0][3], length)

        for each in found:
            value, right = each.values.value, self.right[each.key]
            for k in range(1, value.ndim + 1) if not right.is_shared else ():
                n, lead, whole = math.prod(value.shape[:k]), tuple(value.shape[:k]), right.value
                x, known = value.reshape(n, -1), tables.setdefault(n, [])
                if x.size(1) > whole.size(1) or (known and known[0][0] > n / 2):
                    continue
                if x.size(1) < whole.size(1):  # some of the columns: those that most tokens agree with
                    guess = best(n) if known else torch.full((n,), -1)
                    columns = columns_of_most(x[guess >= 0], whole[guess[guess >= 0]])
                    if columns is None:
                        continue
                    whole = whole[:, columns]
                cells = alike(x, whole)
                if n in asked:  # a token must have its own id, too, whether the dimensions are turned or not
                    ids, turned = asked[n]
                    cells = max((cells & ids, cells & turned), key=lambda each: int(each.any(1).sum()))
                counts = cells.sum(1)
                if value.ndim == k and len(lead) == 2:  # ids (B, T)
                    asked.setdefault(n, (cells, cells.view(*lead, -1).transpose(0, 1).reshape(n, -1)))
                if counts.any():
                    known.append((int((counts == 1).sum()), int((counts > 0).sum()), cells, lead))
                    known.sort(key=lambda table: table[:2], reverse=True)
        return {n: (best(n), known[0][3]) for n, known in tables.items() if known}

    def gathered(
        self, found: list[Local], layouts: dict[int, Layout], others: dict[tuple[int, int], list[Layout]]
    ) -> dict[int, Layout]:
        """Find layouts of tensors of which a rank has some columns, which can be the only ones with these tokens, as
        with sequence parallelism: by trying all tokens of the rows, and the layouts of other ranks.
        """
        tokens = [each[each >= 0] for each, _ in layouts.values()]
        rows = (torch.cat(tokens) // self.shape[1]).unique() if tokens else torch.empty(0).long()
        whole = rows[:, None] * self.shape[1] + torch.arange(self.shape[1])  # (B, T)
        more = dict[int, Layout]()
        for each in found if tokens else ():
            value, right = each.values.value, self.right[each.key].value
            n = value.numel() // value.size(-1) if value.ndim > 1 else 0
            if n in layouts or n in more or value.size(-1) > right.size(1):
                continue
            guesses = [(w.flatten(), tuple(w.shape)) for w in (whole, whole.T) if w.numel() == n]
            for guess, lead in guesses + others.get((each.key[0], n), []):
                kept = guess >= 0
                if columns_of_most(value.reshape(n, -1)[kept], right[guess[kept]]) is not None:
                    more[n] = guess, lead
                    break
        return more

    def find_tokens(self, found: list[Local], layouts: dict[int, Layout]) -> None:
        """Give the records of a forward pass their tokens."""
        for each in found:
            x, grad, right = each.values.value, each.values.grad, self.right[each.key]
            if right.is_shared and x.ndim > 2 and x.size(0) == 1:
                rows = [lead[0] for _, lead in layouts.values() if lead[1:] == x.shape[1:2]]
                x = x.expand(*rows[:1] or (1,), *x.shape[1:])
            fits = [k for k in range(1, x.ndim + 1) if math.prod(x.shape[:k]) in layouts]
            fits = [k for k in fits if math.prod(x.shape[k:]) <= right.value.size(1)]
            if not fits:
                each.x = x.reshape(-1, x.size(-1)) if x.ndim > 1 else None
                each.is_known = not layouts or (x.ndim > 1 and x.size(-1) == right.value.size(1))
                continue
            lead, n = tuple(x.shape[: fits[0]]), math.prod(x.shape[: fits[0]])
            tokens, known = layouts[n]
            each.x, each.dx = x.reshape(n, -1), None
            if grad is not None and grad.shape == x.shape:
                each.dx = grad.reshape(n, -1)
            # A model can be (B, T) here and (T, B) there.
            turned = tokens.view(known).T.flatten() if len(known) == 2 else tokens
            is_turned = lead == known[::-1]
            if (lead != known and not is_turned) or known[0] == known[-1]:
                is_turned = find_columns(each.x, right.value[turned]) is not None
            tokens = turned if is_turned else tokens
            kept = tokens >= 0  # the others are padding, if all tokens of the batch are on some rank
            each.x, each.dx, each.tokens = each.x[kept], None if each.dx is None else each.dx[kept], tokens[kept]

    def keep_order(self, step: int) -> None:
        """Let the tokens of each record have an order that the input of the first module has somewhere, (B, T) or
        (T, B): a permutation of them would be a mistake.
        """
        first = min((key for key in self.right if key[0] == step and key[2] in ACTIVATIONS), key=self.order)
        asked = list[Tensor]()
        for each in self.at.get(first, []):
            if each.tokens is not None:
                lead = each.values.value.shape[:2]
                asked += [
                    each.tokens,
                    *([each.tokens.view(lead).T.flatten()] if lead.numel() == len(each.tokens) else []),
                ]
        for key in self.keys(step, *ACTIVATIONS):
            for each in self.at[key]:
                tokens = each.tokens
                if tokens is not None and not any(torch.equal(tokens, a) for a in asked):
                    same = [a for a in asked if torch.equal(a.sort().values, tokens.sort().values)]
                    each.tokens = [*same, tokens][0]

    def order(self, key: Key) -> int:
        return self.right[key].order

    def keys(self, step: int, *kinds: str) -> list[Key]:
        """Return the tensors of a step that are on some rank, in the reference's order of execution."""
        return sorted((k for k in self.at if k[0] == step and k[2] in kinds), key=self.order)
