"""Sentences about the first wrong tensor of a run: where it is, what it is instead, and what before it is equal."""

import math
import re
from typing import Any

import torch
from torch import Tensor

from conformance.compare import LIMIT, Difference, factor_of, unequal
from conformance.trace_places import rows_alike
from conformance.trace_tensors import Key, Local

PLACES = {  # of a tensor of each phase: name, and what follows after the sentence about it
    "LOAD": ("{weight} on {ranks}", ", before the first step: it is loaded wrongly"),
    "FORWARD": ("{label} on {ranks}", "; {before} is equal"),
    "BACKWARD": ("gradient of {label} on {ranks}", "; gradient of {before} is equal"),
    "GRADIENTS": ("gradient of {weight} on {ranks}", "; the gradients of all outputs are equal{factor}"),
    "CLIP": ("gradient of {weight} on {ranks}", ", when the optimizer gets it"),
    "UPDATE": (
        "{weight} on {ranks} after the optimizer's step",
        "; {gradients} and their norm are equal: {cause}",
    ),
}


class Sentences:
    """The sentences of a `Trace`."""

    def __init__(self, trace: Any) -> None:
        self.trace, self.length = trace, trace.shape[1]

    def wrong(self, wrong: list[Local]) -> str:
        """Describe a tensor that is wrong on some ranks or in some micro-batches: that of one of them."""
        each = min(wrong, key=lambda w: (not w.x.isnan().any(), w.rows is None, w.rank, w.call))
        step, phase, name, kind = each.key
        keys, before = self.trace.keys(step, phase), list[Local]()
        for key in keys[: keys.index(each.key)]:
            before += [o for o in self.trace.at[key] if o.is_right and (o.rank, o.call) == (each.rank, each.call)]
        cause = None
        while before and before[-1].ranks:
            cause = before.pop()
        place, end = PLACES[phase.name]
        ranks = many("rank", sorted({w.rank for w in wrong}))
        # A tensor that is right as the output of one module can be wrong as that of the next one.
        label = f"{short(name)} {kind}" if each.label in {o.label for o in before} else each.label
        text = place.format(label=label, weight=f"{short(name)}.{kind}", ranks=ranks)
        text += ", computed again for backward," if each.again else ""
        text += self.instead(each)
        if cause is not None:
            place = place.format(label=cause.label, ranks="ranks " + ", ".join(map(str, cause.ranks)))
            terms = self.trace.peers(cause)
            are_equal = all(term.x.equal(cause.x) for term in terms)  # a sum that is divided by the number of ranks
            of_right = f"{1 / len(terms):.6g} times what it should be"
            return f"{place} is {of_right if are_equal else 'one term of a sum, which is missing or wrong'}: {text}"
        if "{before}" in end and not before:
            return text
        words = {"gradients": self.gradients(step), "factor": self.factor(step), "cause": self.cause(step)}
        return text + end.format(before=before[-1].label if before else "", **words)

    def factor(self, step: int) -> str:
        """Name the constant of a step's gradients of outputs, by which they are divided before they are compared."""
        found = [c for (s, phase, _), c in self.trace.factors.items() if s == step and phase.name == "BACKWARD"]
        return f", but for the factor {times(found[0])} of all of them" if found and abs(found[0] - 1) > 1e-6 else ""

    def cause(self, step: int) -> str:
        """Say why a weight is the first wrong tensor. An optimizer that is not torch's shows no clipped gradients."""
        is_seen = any(key[0] == step and key[1].name == "CLIP" for key in self.trace.at)
        return "the update is wrong" if is_seen else "the update is wrong, or clipping (no optimizer of torch was seen)"

    def instead(self, each: Local) -> str:
        """Say what a wrong tensor is."""
        x, columns = each.x, each.columns
        is_weight = each.label == ""
        if x.isnan().any():
            where = "" if each.rows is None or is_weight else f": {self.tokens(each.rows[x.isnan().any(1)])}"
            return f" is NaN in {x.isnan().double().mean():.0%} of its numbers{where}"
        if each.rows is None:
            return " is no part of the right one" + ("" if is_weight else ": none of its rows is one of its rows")
        if not x.any():
            return " is 0"
        if columns is not None and not columns.equal(needed := self.trace.columns_for_weight(each, columns)):
            return f" has columns {spans(columns.tolist())}, but its weight needs {spans(needed.tolist())}"
        if columns is None and each.value is not None:
            columns = each.value.columns
        if columns is None and x.size(1) == each.right.size(1):
            columns = torch.arange(x.size(1))
        if columns is None:
            return ": some of its columns are none of the right ones"
        whole = each.right * self.trace.factors.get((*each.key[:2], each.rank), 1.0)
        want = whole[each.rows][:, columns]
        bad = ~((x - want).abs() <= LIMIT * whole.abs().max())
        rows = bad.any(1)
        peers = self.trace.peers(each)
        if hint := one_factor(x[rows], want[rows]):
            return hint + ("" if rows.all() or is_weight else f", in {self.tokens(each.rows[rows])}")
        if is_weight and (hint := one_term(peers, want)):
            return hint
        if not is_weight and x.size(1) == whole.size(1) and (hint := self.elsewhere(each, x, whole, rows)):
            return hint
        i, j = bad.nonzero()[0].tolist()
        at = [int(each.rows[i]), int(columns[j])][-2 if len(each.right) > 1 else -1 :]
        where = str(at) if is_weight else f"{self.tokens(each.rows[i : i + 1])}, column {j}"
        text = f" is {unequal(x[i, j].item(), want[i, j].item())}, at {where}"
        if is_weight:
            return text + ("" if bad.all() else f"; {bad.double().mean():.0%} of it differs")
        text += "" if rows.all() else f"; only {self.tokens(each.rows[rows])} differ"
        text += "" if bad.any(0).all() else f"; only columns {spans(bad.any(0).nonzero()[:, 0].tolist())} differ"
        if x.size(1) == whole.size(1) and not columns.equal(torch.arange(x.size(1))):
            text += f"; its columns come in the order {spans(columns.tolist())}"
        others = [peer for peer in peers if peer is not each]
        if others:
            agree = all(peer.x.equal(x) for peer in others)
            ranks = many("rank", [peer.rank for peer in others])
            text += f"; {ranks} with the same tokens {'agree' if agree else 'differ from it'}"
        return text

    def elsewhere(self, each: Local, x: Tensor, whole: Tensor, rows: Tensor) -> str:
        """Say which other tokens have the numbers that are wrong."""
        assert each.rows is not None
        cells, own = rows_alike(x[rows], whole), each.rows[rows]
        if not cells.any(1).all():
            return ""
        there, here = self.tokens(cells.int().argmax(1)), self.tokens(own)
        return f" holds the values of {there}, not of {here}" if there != here else f" holds {here} in another order"

    def tokens(self, tokens: Tensor) -> str:
        rows, positions = (sorted(set(x.tolist())) for x in (tokens // self.length, tokens % self.length))
        return f"{many('row', rows)}, {many('token', positions)}"

    def on_no_rank(self, key: Key, missing: Tensor) -> str:
        """Say which part of a tensor is on no rank: rows (G, C) that are True, or columns."""
        rows = missing.all(1).nonzero()[:, 0]
        is_weight = key[3] in ("weight", "bias")
        part = f"rows {spans(rows.tolist())}" if is_weight else self.tokens(rows)
        if not len(rows):
            part = f"columns {spans(missing.any(0).nonzero()[:, 0].tolist())}"
        of, verb = "gradient of " if key[1].name == "BACKWARD" else "", "are" if missing.sum() > 1 else "is"
        return f"{of}{short(key[2])} {key[3]}: {part} {verb} on no rank"

    def unequal_shards(self, key: Key, right: list[Local]) -> str:
        """Say that some rows or columns of a weight are on more ranks than others, or that a rank has other key/value
        heads than its query heads need; "" if neither is so.
        """
        counts = torch.zeros(self.trace.right[key].x.shape, dtype=torch.long)
        for each in {each.rank: each for each in right}.values():
            if each.rows is not None and each.columns is not None:
                counts[each.rows[:, None], each.columns] += 1
        weight = f"{short(key[2])}.{key[3]}"
        if counts.min() < counts.max():
            dim = 0 if len(counts.amax(1).unique()) > 1 else 1
            few = (counts.amin(1 - dim) < counts.max()).nonzero()[:, 0]
            part = f"{('rows', 'columns')[dim]} {spans(few.tolist())}"
            numbers = f"on {counts.min()} ranks, others on {counts.max()}"
            return f"{weight}: {part} are {numbers}, before the first step: it is loaded wrongly"
        config = self.trace.config
        q_name = re.sub(r"\.[kv]_proj$", ".q_proj", key[2])
        for each in right if q_name != key[2] and config is not None else ():
            places = self.trace.places.get((each.rank, q_name, key[3]))
            width, heads = len(counts) // config.num_key_value_heads, config.num_attention_heads
            if places is not None and each.rows is not None and len(counts) % config.num_key_value_heads == 0:
                used = {head * config.num_key_value_heads // heads for head in (places[0] // width).tolist()}
                held = {*(each.rows // width).tolist()}
                if not used <= held:
                    return (
                        f"{weight} on rank {each.rank} has heads {spans(sorted(held))}, but its query heads use "
                        f"{spans(sorted(used))}, before the first step: it is loaded wrongly"
                    )
        return ""

    def gradients(self, step: int) -> str:
        """Name the gradients of a step that are compared."""
        phases = {key[1].name for key in self.trace.at if key[0] == step}
        return "the gradients" if phases & {"GRADIENTS", "CLIP"} else "the gradients of outputs (not of weights)"

    def number(self, difference: Difference) -> str:
        what = f"{difference.what} of {difference.name}" if difference.name else difference.what
        ranks = f" on {many('rank', list(difference.ranks))}" if difference.ranks else ""
        found = "" if math.isnan(difference.right) else f" is {unequal(difference.found, difference.right)}"
        hint = f" ({difference.hint})" if difference.hint else ""
        before = f"the outputs and {self.gradients(difference.step - 1)} before it are equal"
        return f"the {what}{ranks}{found}{hint}; {before}"

    def clipping(self, step: int) -> str:
        """Describe gradients that are multiplied by a wrong number; "" if they are not."""
        found = {r: c for (s, phase, r), c in sorted(self.trace.factors.items()) if s == step and phase.name == "CLIP"}
        texts = [f"{times(c)} times what it should be on rank {r}" for r, c in found.items() if abs(c - 1) > 1e-6]
        return (
            f"clipping: every gradient is {', '.join(texts)}, when the optimizer gets it; their norm is equal"
            if texts
            else ""
        )


def one_factor(x: Tensor, want: Tensor) -> str:
    """Say that a tensor is a multiple of what it should be; "" if it is not."""
    c = factor_of(x, want)
    if c is None or abs(c - 1) <= 1e-9:
        return ""
    return f" is {times(c)} times what it should be" if c else " is 0"


def times(factor: float) -> str:
    return f"{factor:.6g}" if f"{factor:.6g}" != "1" else f"(1 {'-' if factor < 1 else '+'} {abs(factor - 1):.1e})"


def one_term(peers: list[Local], want: Tensor) -> str:
    """Say that the sum or the mean of what ranks hold is right; "" if it is not."""
    total, ranks = torch.stack([peer.x for peer in peers]).sum(0), many("rank", [peer.rank for peer in peers])
    for word, factor in (("sum", 1.0), ("mean", 1 / len(peers))) if len(peers) > 1 else ():
        if ((factor * total - want).abs() <= LIMIT * want.abs().max()).all():
            return f" is one term of a {word} over {ranks}, which nobody has computed"
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
