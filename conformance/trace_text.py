"""Sentences about the first wrong tensor of a run: where it is, what it is instead, and what before it is equal."""

from typing import Any

import torch
from torch import Tensor

from conformance.compare import LIMIT, Difference, factor_of, unequal
from conformance.trace_places import Key, Local, Phase, rows_alike

LOADED = ", before the first step: it is loaded wrongly"
PLACES = {  # of a tensor of each phase: name, and what follows after the sentence about it
    "LOAD": ("{weight} on {ranks}", LOADED),
    "FORWARD": ("{label} on {ranks}", "; {before} is equal"),
    "BACKWARD": ("gradient of {label} on {ranks}", "; gradient of {before} is equal"),
    "GRADIENTS": ("gradient of {weight} on {ranks}", "; the gradients of all outputs are equal{factor}"),
    "CLIP": ("gradient of {weight} on {ranks}", ", when the optimizer gets it"),
    "UPDATE": ("{weight} on {ranks} after the optimizer's step", "; all before it is equal: {cause}"),
}


class Sentences:
    """The sentences of a `Trace`."""

    def __init__(self, trace: Any) -> None:
        self.trace, self.length = trace, trace.shape[1]

    def wrong(self, wrong: list[Local]) -> str:
        """Describe a tensor that is wrong on some ranks or in some micro-batches: that of one of them."""
        each = min(wrong, key=lambda w: (w.rows is None, not w.x.isnan().any(), w.rank, w.call))
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
        text += (", computed again for backward," if each.again else "") + self.instead(each)
        if cause is not None:
            place = place.format(label=cause.label, ranks=many("rank", list(cause.ranks)))
            terms = self.trace.peers(cause)
            are_equal = all(term.x.equal(cause.x) for term in terms)  # a sum that is divided by the number of ranks
            of_right = f"{1 / len(terms):.6g} times what it should be"
            return f"{place} is {of_right if are_equal else 'one term of a sum, which is missing or wrong'}: {text}"
        if "{before}" in end and not before:
            return text
        return text + end.format(
            before=before[-1].label if before else "", factor=self.factor(step), cause=self.cause(step)
        )

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
        x, columns, is_weight = each.x, each.columns, each.label == ""
        if x.isnan().any():
            return f" is NaN in {x.isnan().double().mean():.0%} of its numbers"
        if each.rows is None:
            return " is no part of the right one"
        if columns is not None and not columns.equal(needed := self.trace.columns_for_weight(each, columns)):
            return f" has columns {spans(columns.tolist())}, but its weight needs {spans(needed.tolist())}"
        if (columns := each.known_columns) is None:
            return ": some of its columns are none of the right ones"
        whole = each.right * self.trace.factors.get((*each.key[:2], each.rank), 1.0)
        want = whole[each.rows][:, columns]
        bad = ~((x - want).abs() <= LIMIT * whole.abs().max())
        rows = bad.any(1)
        if (c := factor_of(x[rows], want[rows])) is not None and abs(c - 1) > 1e-9:
            hint = f" is {times(c)} times what it should be" if c else " is 0"
            places = f"rows {spans(each.rows[rows].tolist())}" if is_weight else self.tokens(each.rows[rows])
            return hint + ("" if rows.all() else f", in {places}")
        if is_weight and (hint := one_term(self.trace.peers(each), want)):
            return hint
        if not is_weight and x.size(1) == whole.size(1) and (hint := self.elsewhere(each, x, whole, rows)):
            return hint
        i, j = bad.nonzero()[0].tolist()
        at = [int(each.rows[i]), int(columns[j])][-2 if len(each.right) > 1 else -1 :]
        where = str(at) if is_weight else f"{self.tokens(each.rows[i : i + 1])}, column {j}"
        only = "" if is_weight or rows.all() else f"; only {self.tokens(each.rows[rows])} differ"
        return f" is {unequal(x[i, j].item(), want[i, j].item())}, at {where}{only}"

    def elsewhere(self, each: Local, x: Tensor, whole: Tensor, rows: Tensor) -> str:
        """Say which other tokens have the numbers that are wrong."""
        assert each.rows is not None
        period = self.length if self.trace.right[each.key].is_shared else len(whole)
        cells, own = rows_alike(x[rows], whole), each.rows[rows] % period
        if not cells.any(1).all() or cells[torch.arange(len(own)), own].any():  # its own numbers, a little wrong
            return ""
        there, here = self.tokens(cells.int().argmax(1)), self.tokens(own)
        return f" holds the values of {there}, not of {here}" if there != here else f" holds {here} in another order"

    def tokens(self, tokens: Tensor) -> str:
        rows, positions = (sorted(set(x.tolist())) for x in (tokens // self.length, tokens % self.length))
        return f"{many('row', rows)}, {many('token', positions)}"

    def part(self, key: Key, cells: Tensor) -> str:
        """Name the rows (G, C) or the columns of a tensor that are True."""
        rows = cells.all(1).nonzero()[:, 0]
        if not len(rows):
            return f"columns {spans(cells.any(0).nonzero()[:, 0].tolist())}"
        return f"rows {spans(rows.tolist())}" if key[3] in ("weight", "bias") else self.tokens(rows)

    def on_no_rank(self, key: Key, missing: Tensor) -> str:
        of = "gradient of " if key[1].name == "BACKWARD" else ""
        return f"{of}{short(key[2])} {key[3]}: {self.part(key, missing)} are on no rank"

    def unequal_shards(self, key: Key, right: list[Local]) -> str:
        """Say that some rows or columns of a weight are on more ranks than others, or that a rank has other key/value
        heads than its query heads need; "" if neither is so.
        """
        counts, weight = torch.zeros(self.trace.right[key].x.shape, dtype=torch.long), f"{short(key[2])}.{key[3]}"
        for each in {each.rank: each for each in right}.values():
            assert each.rows is not None
            counts[each.rows[:, None], each.columns] += 1
        if counts.min() < counts.max():
            few = self.part(key, counts < counts.max())
            return f"{weight}: {few} are on {counts.min()} ranks, others on {counts.max()}{LOADED}"
        for rank in sorted({each.rank for each in right}) if "k_proj" in key[2] else ():
            if text := self.wrong_heads(key, rank):
                return f"{weight} on rank {rank} has {text}{LOADED}"
        return ""

    def wrong_heads(self, key: Key, rank: int) -> str:
        """Say that a rank's key/value heads are not those of its query heads, or in another order; "" if its attention
        is right, as with an order of the trainer's own, or of shards that are stored only.
        """
        config, attention = self.trace.config, key[2].partition(".self_attn.")[0] + ".self_attn"
        outputs = self.trace.at.get((key[0], Phase.FORWARD, f"{attention}.o_proj", "input"), [])
        kv, count = config.num_key_value_heads, config.num_attention_heads
        q, k, v = (
            self.heads_of(key, f"{attention}.{name}_proj", rank, n) for name, n in (("q", count), ("k", kv), ("v", kv))
        )
        is_right = all(self.trace.is_right(each) is not False for each in outputs if each.rank == rank)
        if is_right or not (len(q) and len(k) and len(v)):
            return ""
        used, keys, values = ((rows[:, 0] // rows.size(1)).tolist() for rows in (q, k, v))
        used, times = [head // (count // kv) for head in used], max(1, len(q) // len(k))
        if not {*used} <= {*keys}:
            return f"heads {spans(sorted(keys))}, but its query heads use {spans(sorted({*used}))}"
        if keys != values or used not in ([head for head in keys for _ in range(times)], keys * times):
            return f"heads {keys} in this order, but its v_proj {values}, and its query heads use {used}"
        inside = torch.cat([q, k]) % q.size(1)
        are_alike = (inside == inside[0]).all()
        return "" if are_alike else "the rows of a head in another order than those of other heads, or of q_proj"

    def heads_of(self, key: Key, name: str, rank: int, count: int) -> Tensor:
        """Return the rows of a weight, or of its part of a joined one, that a rank has: (heads of the rank, width)."""
        for (other, joined, kind), (rows, _) in self.trace.places.items():
            names = joined.split(" + ")
            if (other, kind) == (rank, "weight") and name in names:
                lengths = [len(self.trace.right[*key[:2], each, kind].x) for each in names]
                start, length = sum(lengths[: names.index(name)]), lengths[names.index(name)]
                own = rows[(rows >= start) & (rows < start + length)] - start
                if len(own) % (length // count) == 0:
                    return own.view(-1, length // count)
        return torch.empty(0, 1)

    def number(self, difference: Difference) -> str:
        of = f" of {difference.name}" if difference.name else ""
        return f"the {difference.what}{of} is the first that differs; all tensors before it are equal"

    def clipping(self, step: int) -> str:
        """Describe gradients that are multiplied by a wrong number; "" if they are not."""
        found = {r: c for (s, phase, r), c in sorted(self.trace.factors.items()) if s == step and phase.name == "CLIP"}
        texts = [f"{times(c)} times what it should be on rank {r}" for r, c in found.items() if abs(c - 1) > 1e-6]
        every = f"clipping: every gradient is {', '.join(texts)}, when the optimizer gets it; their norm is equal"
        return every if texts else ""


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
