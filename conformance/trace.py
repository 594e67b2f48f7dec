"""The first wrong tensor of a run: the records of its modules, compared with those of the reference.

A rank need not say which part of a tensor it holds. Its tokens, its columns, or a sum over ranks are the ones whose
numbers are the reference's, so a tensor is wrong if it is no part of the right one. The walk takes each step in the
order of its computation: weights, forward, backward, gradients of weights, their norm, the clipped gradients. The
weights of the next step show the update.
"""

import math
import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.compare import Difference
from conformance.reference import Reference
from conformance.result import Result
from conformance.trace_places import find_columns, near, part_of, place, ratio_of
from conformance.trace_recorder import Record
from conformance.trace_records import ACTIVATIONS, Key, Local, Records
from conformance.trace_text import Sentences, one_term


class Trace(Records):
    """A comparison of all ranks' records with the reference's.

    Args:
        case, right, rename: see `Records`.
        reference, results: results of the reference and of the ranks.

    Attributes:
        seen: the tensors (of the backward: True) that are equal.
        reached: names of the reference's modules of which a tensor is equal.
    """

    def __init__(
        self, case: Case, right: list[Record], reference: Reference, results: list[Result], rename: Callable[[str], Any]
    ) -> None:
        super().__init__(case, right, rename)
        self.reference, self.results, self.say = reference, results, Sentences(self)
        self.factors, self.otherwise = dict[int, float](), set[str]()
        self.seen, self.reached = set[tuple[int, bool]](), set[str]()
        self.places: dict[tuple[int, str, str], Any] = {}

    def peers(self, each: Local) -> list[Local]:
        """Return the same record of the ranks with the same tokens, one per rank."""
        found = dict[int, Local]()
        for other in self.at[each.key]:
            if other.again == each.again and same(each.tokens, other.tokens):
                found.setdefault(other.rank, other)
        return list((found | {each.rank: each}).values())

    def verdict(self, each: Local, backward: bool) -> str:
        """Return how a record is a part of the reference's: `whole`, `columns`, `a sum over ranks 0, 1`; "": none."""
        if backward not in each.verdicts:
            each.verdicts[backward] = self.judge(each, backward)
            if each.verdicts[backward]:
                self.seen.add((id(each.values), backward))
                self.reached.update(each.key[1].split(" + "))
        return each.verdicts[backward]

    def judge(self, each: Local, backward: bool) -> str:
        right = self.right[each.key]
        whole = right.grad * self.factors[each.key[0]] if backward and right.grad is not None else right.value
        x = each.dx if backward else each.x
        if each.tokens is None or x is None:
            return ""
        want, scale = whole[each.tokens], whole.abs().max().item()
        peers = self.peers(each)
        terms = [t for t in (p.dx if backward else p.x for p in peers) if t is not None and t.shape == x.shape]
        ranks = ", ".join(str(p.rank) for p in sorted(peers, key=lambda p: p.rank))
        sums = [(f"a sum over ranks {ranks}", torch.stack(terms).sum(0))] if 1 < len(terms) == len(peers) else []
        for join, y in (("", x), *sums):
            columns = find_columns(y, want, scale)
            if columns is not None:
                each.columns = columns if each.columns is None else each.columns
                return join or ("whole" if y.shape == want.shape else "columns")
        return ""

    def find_factor(self, step: int) -> float:
        """Return the constant of all gradients: a trainer may divide by the number of targets or ranks at the end."""
        for key in reversed(self.keys(step, *ACTIVATIONS)):
            right, ratios = self.right[key].grad, list[float]()
            for each in self.at[key] if right is not None else ():
                terms = [
                    p.dx
                    for p in self.peers(each)
                    if p.dx is not None and each.dx is not None and p.dx.shape == each.dx.shape
                ]
                if (
                    right is not None
                    and terms
                    and each.columns is not None
                    and each.columns.size(0) == terms[0].size(1)
                ):
                    want = right[each.tokens][:, each.columns.double().argmax(1)]
                    found = [ratio_of(x, want) for x in (each.dx, torch.stack(terms).sum(0)) if x is not None]
                    ratios += [c for c in found if c is not None][:1]
            if ratios:
                return statistics.median_low(ratios)
        return 1.0

    def is_beside(self, each: Local, backward: bool) -> bool:
        """Whether a wrong tensor is only computed otherwise: the input of a matrix through which it acts is right, in
        forward a later one, in backward an earlier one. What all layers share acts through all of them.
        """
        mine, pattern = self.right[each.key], re.sub(r"\d+", "*", each.key[1]) + each.key[2]
        if pattern in self.otherwise:
            return True
        paths = list[Local]()
        for other in self.forwards[each.rank, each.forward]:
            right, x = self.right[other.key], other.dx if backward else other.x
            if right.is_path and x is not None and (right.made < mine.made if backward else right.made > mine.made):
                paths.append(other)
        verdicts = (bool(self.verdict(other, backward)) for other in paths)
        found = bool(paths) and (all(verdicts) if mine.is_shared else any(verdicts))
        self.otherwise |= {pattern} if found and not backward else set()
        return found

    # -------------------------------------------------------------------------------------------------- the walk

    def first_wrong(self, difference: Difference | None) -> str:
        """Return a sentence about the first wrong tensor; "" if there is none."""
        for step in self.case.steps:
            if text := self.wrong_weight(step):
                return f"step {step + 1}: {text}" if step == self.case.first_step else f"step {step}: {text}"
            text = self.wrong_activation(step, backward=False)
            self.factors[step] = self.find_factor(step)
            text = text or self.wrong_activation(step, backward=True) or self.wrong_gradient(step)
            gradient, factor = ("", "") if text else self.wrong_clipping(step)
            numbers = ("loss", "gradient norm", "evaluation")
            if difference is not None and difference.step == step + 1 and difference.what in numbers:
                gradient = gradient or self.say.number(difference)
            if text := text or gradient or factor:
                return f"step {step + 1}: {text}{self.first_nan(step, text)}"
        if difference is not None and difference.what in ("weight", "gradient"):
            return f"step {difference.step}: {self.say.last_weight(difference)}"
        return ""

    def first_nan(self, step: int, text: str) -> str:
        """Say where a step has its first NaN, if another tensor is wrong before it."""
        found = (k for k in self.keys(step, *ACTIVATIONS) for each in self.at[k] if each.values.value.isnan().any())
        key = None if "NaN" in text else next(found, None)
        return f"; the first NaN is in {key[1]} {key[2]}" if key else ""

    def wrong_activation(self, step: int, backward: bool) -> str:
        keys, judged = self.keys(step, *ACTIVATIONS), dict[tuple[int, int], list[Local]]()
        for key in reversed(keys) if backward else keys:
            right, found, wrong = self.right[key], [each for each in self.at[key] if each.is_known], list[Local]()
            if backward:
                found = [each for each in found if each.values.grad is not None and right.grad is not None]
            for each in found:
                if self.verdict(each, backward):
                    judged.setdefault((each.rank, each.forward), []).append(each)
                elif not self.is_beside(each, backward):
                    wrong.append(each)
            known = [each for each in found if each.columns is not None and self.verdict(each, backward)]
            gone = self.missing(key, known, backward) if known else "all"
            # torch's pipeline finds out shapes by a trial. It has no tokens, and nobody misses them.
            wrong = wrong if gone else [each for each in wrong if each.tokens is not None]
            if wrong:
                return self.say.activation(wrong, backward, judged)
            if known and gone and len(known) == len(found):
                return gone
        return ""

    def missing(self, key: Key, found: list[Local], backward: bool) -> str:
        """Say which tokens or columns of a tensor are on no rank."""
        tokens = torch.zeros(math.prod(self.shape), dtype=torch.bool)
        for each in found:
            tokens[each.tokens] = True
            columns = torch.stack([p.columns.any(0) for p in self.peers(each) if p.columns is not None]).any(0)
            if not columns.all():
                return self.say.on_no_rank(key, backward, "columns", ~columns)
        return "" if tokens.all() else self.say.on_no_rank(key, backward, "tokens", ~tokens)

    def wrong_weight(self, step: int) -> str:
        """Compare the weights before a step, of which a rank can hold all, some rows or some columns."""
        for key in self.keys(step, "weight", "bias"):
            right, covered, wrong, all_known = self.right[key].value, list[Tensor](), list[Local](), True
            for each in self.at[key]:
                dim, matches = place(each.values.value, right) or (0, None)
                all_known &= matches is not None
                if matches is not None:
                    self.places[each.rank, key[1], key[2]] = dim, matches
                    self.seen.add((id(each.values), False))
                    covered.append(matches.any(0))
                elif place(each.values.value, right) is not None:  # a trainer may store it otherwise
                    outputs = [o for o in self.at.get((step, key[1], "output"), []) if o.rank == each.rank]
                    wrong += [] if outputs and all(self.verdict(o, False) for o in outputs) else [each]
            if wrong:
                return self.say.weight(wrong, step > self.case.first_step)
            if all_known and len({len(c) for c in covered}) == 1 and not torch.stack(covered).any(0).all():
                what = "rows" if len(covered[0]) == right.size(0) else "columns"
                return self.say.on_no_rank(key, False, what, ~torch.stack(covered).any(0))
        return ""

    def wrong_gradient(self, step: int) -> str:
        """Compare the gradients of weights that the adapter returns, those of the first step, in backward's order."""
        whole = self.reference.gradients if step == self.case.first_step else {}
        made = {key[1]: self.order(key) for key in self.right if key[0] == step and key[2] == "output"}
        for name in sorted(whole, key=lambda name: -made.get(name.rpartition(".")[0], -1)):
            scale = whole[name].abs().max().item()
            names = [name, "lm_head.weight"] if "lm_head.weight" not in whole and "embed_tokens" in name else [name]
            held: list[tuple[int, Any]] = [
                (rank, each.gradients[n])
                for rank, each in enumerate(self.results)
                for n in names
                if n in each.gradients
            ]
            wrong = [(rank, part) for rank, part in held if not near(part.tensor.double(), part.of(whole[name]), scale)]
            self.seen |= {(id(part), True) for _, part in held}
            if wrong:
                rank, part = wrong[0]
                want, like = part.of(whole[name]), [(r, p.tensor.double()) for r, p in held if p.start == part.start]
                own = [(r, t) for r, t in like if r == rank]
                hint = one_term(own, want, scale) and "is not the sum of those of the embedding and the head"
                return self.say.gradient(name, wrong, want, hint or one_term(like, want, scale))
        return ""

    def wrong_clipping(self, step: int) -> tuple[str, str]:
        """Compare the gradients that the optimizer gets, where its parameters are the model's. Return sentences about
        one that is no multiple of the right one, as all others on its rank are, and about these multiples.
        """
        found = list[tuple[Local, Tensor, float | None]]()
        for key in reversed(self.keys(step, "update of weight", "update of bias")):
            right = self.right[key]
            for each in self.at[key]:
                values, fit = each.values, place(each.values.value, right.value)
                if right.grad is not None and values.grad is not None and fit is not None and fit[1] is not None:
                    want = part_of(right.grad, fit)
                    self.seen.add((id(values), True))
                    found.append((each, want, ratio_of(values.grad[: len(want)], want)))
        ranks = {each.rank for each, _, _ in found}
        common = {r: statistics.median([c or 0.0 for each, _, c in found if each.rank == r]) for r in ranks}
        others = [(each, want) for each, want, c in found if c is None or abs(c - common[each.rank]) > 1e-6 * abs(c)]
        text = self.say.clipped(*others[0]) if others else ""
        return text, self.say.factors({rank: c for rank, c in common.items() if abs(c - 1) > 1e-6})


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)
