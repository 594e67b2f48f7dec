"""Sentences about the first wrong tensor of a run: where it is, what it is instead, and what before it is equal."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conformance.compare import LIMIT, Difference
from conformance.result import Part
from conformance.trace_places import alike, part_of

if TYPE_CHECKING:
    from conformance.trace import Trace
    from conformance.trace_records import Key, Local


class Sentences:
    """The sentences of a `Trace`."""

    def __init__(self, trace: "Trace") -> None:
        self.trace = trace
        self.length = trace.shape[1]

    def tokens(self, tokens: Tensor) -> str:
        rows, positions = (sorted(set(x.tolist())) for x in (tokens // self.length, tokens % self.length))
        return f"{many('row', rows)}, {many('token', positions)}"

    def name(self, each: "Local") -> str:
        """Return the name of a tensor where it was recorded first: an output rather than the input that it becomes."""
        first = self.trace.first[id(each.values)]
        return f"{short(first.key[1])} {first.key[2]}"

    def activation(self, wrong: list["Local"], backward: bool, judged: dict[tuple[int, int], list["Local"]]) -> str:
        """Describe a tensor that is wrong on some ranks or in some micro-batches: that of one of them."""

        def first(each: "Local") -> tuple[bool, bool, int, int]:
            x = each.dx if backward else each.x
            return x is None or not x.isnan().any(), each.tokens is None, each.rank, each.forward

        each, trace = min(wrong, key=first), self.trace
        x, what = each.dx if backward else each.x, "gradient of " if backward else ""
        text = f"{what}{self.name(each)} on {many('rank', sorted({w.rank for w in wrong}))}"
        if each.again:
            text += ", computed again for backward,"
        right, chain = trace.right[each.key], judged.get((each.rank, each.forward), [])
        whole = right.grad * trace.factors[each.key[0]] if backward and right.grad is not None else right.value
        causes = []
        while chain and chain[-1].verdicts[backward].startswith("a sum"):
            causes.append(chain.pop())
        if causes:
            last = causes[-1]
            kind, ranks = f"{what}{self.name(last)}", last.verdicts[backward].removeprefix("a sum over ")
            cause = f"{kind} on {ranks} is one term of a sum, which is missing or wrong"
            return f"{cause}: {self.instead(text, each, x, whole, backward)}"
        equal = f"; {what}{self.name(chain[-1])} is equal" if chain else ""
        return self.instead(text, each, x, whole, backward) + equal

    def instead(self, text: str, each: "Local", x: Tensor | None, whole: Tensor, backward: bool) -> str:
        """Say what a wrong tensor is."""
        if x is None:
            return f"{text} is wrong"
        if x.isnan().any():
            where = "" if each.tokens is None else f": {self.tokens(each.tokens[x.isnan().any(1)])}"
            return f"{text} is NaN in {x.isnan().double().mean():.0%} of its numbers{where}"
        if each.tokens is None:
            return f"{text} is no part of the right tensor: none of its rows is one of its rows"
        if not x.any():
            return f"{text} is 0"
        scale, want = whole.abs().max().item(), whole[each.tokens]
        known = next(
            (o.columns for o in self.trace.at[each.key] if o.rank == each.rank and o.columns is not None), None
        )
        if known is not None and len(known) == x.size(1):
            want = want[:, known.double().argmax(1)]
        if x.shape != want.shape:
            return f"{text}: some of its columns are none of the right ones"
        bad = ~((x - want).abs() <= LIMIT * scale)
        rows, columns = bad.any(1), bad.any(0)
        if hint := one_factor(x, want, rows):
            return f"{text} {hint}" + ("" if rows.all() else f", in {self.tokens(each.tokens[rows])}")
        if x.size(1) == whole.size(1) and (hint := self.elsewhere(each, x, whole, rows)):
            return f"{text} {hint}"
        i, j = (bad.nonzero()[0]).tolist()
        text += f" is {x[i, j]:.6g}, not {want[i, j]:.6g}, at {self.tokens(each.tokens[i : i + 1])}, column {j}"
        text += "" if rows.all() else f"; only {self.tokens(each.tokens[rows])} differ"
        text += "" if columns.all() else f"; only columns {spans(columns.nonzero()[:, 0].tolist())} differ"
        others = [p for p in self.trace.peers(each) if p.rank != each.rank]
        if others:
            agree = all(
                torch.equal(p_x, x) if (p_x := p.dx if backward else p.x) is not None else False for p in others
            )
            ranks = many("rank", sorted(p.rank for p in others))
            text += f"; {ranks} with the same tokens {'agree' if agree else 'differ from it'}"
        return text

    def elsewhere(self, each: "Local", x: Tensor, whole: Tensor, rows: Tensor) -> str:
        """Say which other tokens have the numbers that are wrong."""
        assert each.tokens is not None
        cells = alike(x[rows], whole)
        if not cells.any(1).all():
            return ""
        own = each.tokens[rows]
        found = cells.double().argmax(1)
        steps = [
            d for d in (-1, 1) if all(0 <= g + d < len(whole) and cells[i, g + d] for i, g in enumerate(own.tolist()))
        ]
        if steps:
            return f"holds the values of the {'next' if steps[0] > 0 else 'previous'} token"
        return f"holds the values of {self.tokens(found)}, not of {self.tokens(own)}"

    def on_no_rank(self, key: "Key", backward: bool, what: str, missing: Tensor) -> str:
        """Say which part of a tensor is on no rank."""
        gone = missing.nonzero()[:, 0]
        part = self.tokens(gone) if what == "tokens" else f"{what} {spans(gone.tolist())}"
        return f"{'gradient of ' if backward else ''}{short(key[1])} {key[2]}: {part} are on no rank"

    def weight(self, wrong: list["Local"], is_updated: bool) -> str:
        """Describe a weight that is wrong before a step."""
        each = wrong[0]
        text = f"{short(each.key[1])}.{each.key[2]} on {many('rank', sorted({w.rank for w in wrong}))}"
        found, whole = each.values.value, self.trace.right[each.key].value
        fit = self.trace.places.get((each.rank, *each.key[1:]))
        want = part_of(whole, fit) if fit else whole
        values = ""
        if want.shape == found.shape:
            bad = ~((found - want).abs() <= LIMIT * whole.abs().max())
            at = tuple(bad.nonzero()[0].tolist())
            values = f" is {found[at]:.6g}, not {want[at]:.6g}, at {list(at)}"
            values += "" if bad.all() else f"; {bad.double().mean():.0%} of it differs"
        if not is_updated:
            return f"{text}{values or ' is no part of the right one'}, before the first step: it is loaded wrongly"
        before = "the gradients and their norm are equal: the update is wrong"
        return f"{text} after the optimizer's step{values or ' is wrong'}; {before}"

    def last_weight(self, difference: Difference) -> str:
        return f"{difference.what} of {difference.name} {self.values(difference)}; all before it is equal: the update is wrong"

    def number(self, difference: Difference) -> str:
        hint = f" ({difference.hint})" if difference.hint else ""
        return (
            f"the {difference.what} {self.values(difference)}{hint}; the outputs and the gradients before it are equal"
        )

    def values(self, difference: Difference) -> str:
        found = "" if math.isnan(difference.right) else f" is {difference.found:.6g}, not {difference.right:.6g}"
        return f"on {many('rank', list(difference.ranks))}{found}"

    def gradient(self, name: str, wrong: list[tuple[int, Part]], want: Tensor, hint: str) -> str:
        """Describe the gradient of a weight, given what the ranks hold of it."""
        part = wrong[0][1]
        hint = one_factor(part.tensor.double(), want) or hint or "differs"
        return f"gradient of {name} on {many('rank', sorted({r for r, _ in wrong}))} {hint}; the gradients of all outputs are equal"

    def clipped(self, each: "Local", want: Tensor) -> str:
        kind, grad = each.key[2].removeprefix("update of "), each.values.grad
        assert grad is not None
        peers = [(p.rank, p.values.grad) for p in self.trace.at[each.key]]
        terms = [(r, g) for r, g in peers if g is not None and g.shape == want.shape]
        hint = one_factor(grad, want) or one_term(terms, want, want.abs().max().item()) or "differs"
        return f"gradient of {short(each.key[1])}.{kind} on rank {each.rank} {hint}, when the optimizer gets it"

    def factors(self, found: dict[int, float]) -> str:
        """Describe clipping by a wrong factor; "" if it is right."""
        if not found:
            return ""
        text = ", ".join(f"{c:.6g} times what it should be on rank {rank}" for rank, c in sorted(found.items()))
        return f"clipping: every gradient is {text}, when the optimizer gets it; their norm is equal"


def one_factor(x: Tensor, want: Tensor, rows: Tensor | None = None) -> str:
    """Say that a tensor, or the rows of it that differ, is a multiple of what it should be; "" if it is not."""
    if rows is not None:
        x, want = x[rows], want[rows]
    if x.shape != want.shape:
        return ""
    counted = want.abs() > 1e-3 * want.abs().max()
    ratios = (x / want)[counted]
    if not len(ratios) or not ratios.isfinite().all() or not x.any():
        return "is 0" if len(ratios) and not x.any() else ""
    c = ratios.median().item()
    return (
        f"is {c:.6g} times what it should be" if (ratios - c).abs().max() < 1e-6 * abs(c) and abs(c - 1) > 1e-9 else ""
    )


def one_term(terms: list[tuple[int, Tensor]], want: Tensor, scale: float) -> str:
    """Say that the sum or the mean of what ranks hold is right; "" if it is not."""
    if len(terms) < 2 or any(t.shape != want.shape for _, t in terms):
        return ""
    total = torch.stack([t for _, t in terms]).sum(0)
    for factor in (1.0, 1 / len(terms)):
        if ((factor * total - want).abs() <= LIMIT * scale).all():
            word = "sum" if factor == 1 else "mean"
            return f"is one term of a {word} over {many('rank', [r for r, _ in terms])}, which nobody has computed"
    return ""


def short(name: str) -> str:
    """Shorten the names of several modules: `layers.0.mlp.gate_proj + up_proj`."""
    first, *others = name.split(" + ")
    return " + ".join([first, *(other.rpartition(".")[2] for other in others)])


def many(word: str, numbers: list[int]) -> str:
    """Write a noun with its numbers: rank 1; ranks 0-3."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def spans(numbers: list[int]) -> str:
    """Write numbers as ranges: 0-3, 12-15."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    text = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in found]
    return ", ".join(text[:6]) + (", ..." if len(text) > 6 else "")
