"""The first wrong tensor of a run: the tensors of all ranks' modules, compared with those of the reference.

A rank need not say which part of a tensor it holds: its tokens, its columns, or a sum over ranks are the ones whose
numbers are the reference's. A tensor is wrong if it is no part of the right one. The walk takes the phases of each step
in order.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from conformance.case import Case
from conformance.compare import Difference
from conformance.reference import Reference
from conformance.result import Result
from conformance.trace_places import (
    ANGLES,
    EMBEDDED,
    Key,
    Local,
    Orders,
    Phase,
    Right,
    as_matrix,
    find,
    first_alike,
    lead_of,
    locate,
    near,
    place_of,
    ratio_of,
    regularity,
    rows_alike,
    same,
    settle,
)
from conformance.trace_recorder import Record, read_records
from conformance.trace_text import Sentences, short

Call = list[tuple[Record, Key]]
Layouts = dict[tuple[int, ...], Tensor]  # the tokens of a call, by the shape of a tensor before its columns


class Trace:
    """A comparison of all ranks' records with the reference's.

    Args:
        case: the case, whose ranks have written their records.
        records: records of the reference.
        reference, results: results of the reference and of the ranks.
        rename: the adapter's function of a module's name, which returns the name of transformers' module, or a tuple of
            names if the module computes what several modules of transformers do.

    Attributes:
        right: the reference's tensors.
        at: the ranks' tensors.
        modules: names of the reference's modules.
        raw: the trainer's names of its modules.
        reason: why a rank has no records, if it says so.
        first: fields of the first wrong tensor, for programs; empty if a number is wrong, or nothing.
    """

    def __init__(
        self,
        case: Case,
        records: list[Record],
        reference: Reference,
        results: list[Result],
        rename: Callable[[str], Any],
    ) -> None:
        self.case, self.rename = case, rename
        self.config = AutoConfig.from_pretrained(case.model_folder)
        self.shape = tuple(case.batch(case.first_step)["input_ids"].shape)
        self.at = dict[Key, list[Local]]()
        self.raw, self.reason, self.first = set[str](), "", dict[str, Any]()
        self.factors = dict[tuple[int, Phase, int], float]()  # of gradients, by step, phase and rank
        self.places = dict[tuple[int, str, str], tuple[Tensor, Tensor]]()  # rows and columns of each rank's weights
        records = [each for each in records if case.first_step <= each.step < case.last_step]
        self.modules = {each.name for each in records if each.kind == "output"}
        self.right = self.tensors_of(records)
        self.read_ranks()
        for rank, result in enumerate(results):
            for step, found, right in zip(case.steps, result.gradients, reference.gradients, strict=False):
                self.read_parts(rank, step, Phase.GRADIENTS, found, right)
            self.read_parts(rank, case.last_step - 1, Phase.UPDATE, result.weights, reference.weights)
        self.say = Sentences(self)

    # ------------------------------------------------------------------------------------------ reading the records

    def key_of(self, record: Record, name: str) -> Key:
        if record.kind in ("input", "output"):
            return record.step, Phase.FORWARD, name, record.kind
        if record.kind.startswith("clipped "):
            return record.step, Phase.CLIP, name, record.kind.removeprefix("clipped ")
        if record.step == self.case.first_step:
            return record.step, Phase.LOAD, name, record.kind
        return record.step - 1, Phase.UPDATE, name, record.kind

    def tensors_of(self, records: list[Record]) -> dict[Key, Right]:
        """Return the tensors of a run of the reference."""
        first, found = dict[int, int](), dict[Key, Right]()
        matrices = {each.name for each in records if each.kind == "weight" and each.values.x.ndim == 2}
        made = {each.name: i for i, each in enumerate(records) if each.kind == "output"}
        for i, each in enumerate(records):
            key, x, n = self.key_of(each, each.name), each.values.x, first.setdefault(id(each.values), i)
            if key[1] != Phase.FORWARD:
                i = -made.get(each.name, 0) if key[1] == Phase.CLIP else i
                found[key] = Right(as_matrix(x), i, i)
            elif (flat := self.in_order(x, each.step)) is not None:
                kinds = each.kind == "input" and each.name in matrices, len(x) == 1 < self.shape[0]
                found[key] = Right(flat, i, n, *kinds)
                # A gradient is complete after all uses of its tensor: it comes where the tensor was made.
                if each.values.grad is not None and (flat := self.in_order(each.values.grad, each.step)) is not None:
                    found[each.step, Phase.BACKWARD, *key[2:]] = Right(flat, -n * len(records) - i, -n, *kinds)
        return found

    def in_order(self, x: Tensor, step: int) -> Tensor | None:
        """Bring an activation of the reference (rows, tokens, ...) into the order of the batch: (tokens, columns)."""
        batch, (rows, length) = self.case.batch(step), self.shape
        lengths = [length] * rows
        if "document_ids" in batch:  # each document was a row of its own, padded
            lengths = [
                n for each in batch["document_ids"] for n in each.unique_consecutive(return_counts=True)[1].tolist()
            ]
        if x.ndim < 2 or x.size(1) != max(lengths) or len(x) not in (1, len(lengths)):
            return None
        x = x.expand(len(lengths), *x.shape[1:])
        return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]).reshape(rows * length, -1)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the reference's names of a module: those that end as its own does, or as the adapter says."""
        given, found = self.rename(name), list[str]()
        for each in (given,) if isinstance(given, str) else given:
            parts = each.split(".")
            ends = [".".join(parts[i:]) for i in range(len(parts))]
            found += [end for end in (*ends, f"model.{each}") if end in self.modules][:1]
        return tuple(found)

    def join(self, names: tuple[str, ...], key: Key) -> None:
        """Add the reference's tensor of a module that computes what several do: their columns, or rows of weights."""
        parts = [self.right[k] for name in names if (k := (*key[:2], name, key[3])) in self.right]
        if key not in self.right and len(parts) == len(names) > 1:
            last = parts[0 if key[1] == Phase.BACKWARD else -1]
            x = torch.cat([each.x for each in parts], 0 if key[3] == "weight" else 1)
            self.right[key] = parts[0] if key[3] == "input" else dataclasses.replace(last, x=x)

    def read_ranks(self) -> None:
        calls, orders = dict[tuple[int, int], Call](), Orders()
        for rank in range(self.case.world_size):
            reason, records = read_records(self.case, rank)
            self.reason = self.reason or reason
            for record in records if not reason else ():
                self.raw.add(record.name)
                names = self.names_of(record.name)
                key = self.key_of(record, " + ".join(names))
                self.join(names, key)
                if key in self.right and key[1] == Phase.FORWARD:
                    self.join(names, (key[0], Phase.BACKWARD, *key[2:]))
                    calls.setdefault((rank, record.call), []).append((record, key))
                elif key in self.right:
                    self.read_weight(rank, key, as_matrix(record.values.x))
        for own in (True, False):  # first the calls that begin with the numbers of tokens
            for (rank, _), found in calls.items():
                if any(key[2:] == EMBEDDED for _, key in found) == own:
                    self.read_call(rank, found, self.layouts(found, orders))

    def read_weight(self, rank: int, key: Key, x: Tensor) -> None:
        """Add a weight, or its gradient when the optimizer gets it. Rows of zeros at the end are padding."""
        right, place, is_gradient = self.right[key].x, self.places.get((rank, *key[2:])), key[1] == Phase.CLIP
        if place is None and not is_gradient:
            place = locate(x, right)
        if place is not None and x.size(1) == len(place[1]) and len(x) >= len(place[0]):
            self.places[rank, key[2], key[3]] = place
            self.add(Local(rank, key, "", x[: len(place[0])], right, *place))
        elif not is_gradient:
            self.add(Local(rank, key, "", x, right))

    def read_parts(self, rank: int, step: int, phase: Phase, parts: Any, whole: dict[str, Tensor]) -> None:
        """Add the gradients or the weights that the adapter returns."""
        made = {k[2]: right.order for k, right in self.right.items() if k[1] == Phase.FORWARD and k[3] == "output"}
        for name, part in parts.items():
            name = "model.embed_tokens.weight" if name not in whole and name == "lm_head.weight" else name
            module, _, kind = name.rpartition(".")
            if name in whole and part.tensor.numel():
                order = made.get(module, 0) * (-1 if phase == Phase.GRADIENTS else 1)
                self.right.setdefault((step, phase, module, kind), Right(as_matrix(whole[name]), order, order))
                self.add(Local(rank, (step, phase, module, kind), "", *place_of(part, whole[name])))

    def read_call(self, rank: int, found: Call, layouts: Layouts) -> None:
        """Add the activations of a call, and their gradients."""
        labels = dict[int, str]()
        for record, key in found:
            values, right, value = record.values, self.right[key], None
            label = labels.setdefault(id(values), f"{short(key[2])} {key[3]}")
            lead = lead_of(values.x, right.x)
            rows = layouts.get(lead)
            if rows is None and right.is_shared:  # for all rows of the batch
                rows = next((each[: lead[1]] for other, each in layouts.items() if other[1:] == lead[1:]), None)
            kept = slice(None) if rows is None else rows >= 0  # the others are padding, if no token is missing
            rows = None if rows is None else rows[kept]
            columns = ~values.x.reshape(lead.numel(), -1)[kept].isneginf().all(0)  # without a vocabulary's padding
            for phase, x in ((Phase.FORWARD, values.x), (Phase.BACKWARD, values.grad)):
                key = key[0], phase, *key[2:]
                if x is not None and x.shape == values.x.shape and key in self.right:
                    x = x.reshape(lead.numel(), -1)[kept][:, columns]
                    value = Local(rank, key, label, x, self.right[key].x, rows, None, record.call, record.again, value)
                    self.add(value)

    def add(self, each: Local) -> None:
        self.at.setdefault(each.key, []).append(each)

    def layouts(self, found: Call, orders: Orders) -> Layouts:
        """Find the tokens of a call, for each shape that its tensors have before the columns.

        The input of the embedding tells the tokens, if they form a sequence; later tensors can be wrong. Other stages
        have the tokens of an order that is there. Without one, every tensor votes.

        Args:
            orders: those that are known, to which the call's is added.
        """
        votes, first = Layouts(), Layouts()
        for record, key in found:
            x, right = record.values.x, self.right[key]
            lead = lead_of(x, right.x)
            x = x.reshape(lead.numel(), -1)
            if not right.is_shared and 0 < x.size(1) <= right.x.size(1):
                cells = (rows_alike if x.size(1) == right.x.size(1) else first_alike)(x, right.x)
                votes[lead] = votes.get(lead, torch.zeros(1)) + cells
                if key[2:] == EMBEDDED:
                    first.setdefault(lead, cells.int())
        tokens = Layouts()
        for shape, each in votes.items():
            places = torch.arange(len(each))
            own = first.get(shape, torch.zeros_like(each))
            rows = max((settle(table, shape, self.shape[1]) for table in (each * own, own)), key=regularity)
            if shape in first and regularity(rows) * 2 >= len(rows) - 1:
                tokens[shape] = rows
                orders.setdefault(shape, []).append(rows)
            # torch's pipeline finds out shapes by a trial with uninitialised memory, in which old rows can be.
            elif each.any(-1).double().mean() > 0.25:
                known = [] if first else orders.get(shape, [])
                sums = [each[places, rows].sum().item() for rows in known]
                tokens[shape] = known[sums.index(max(sums))] if known else settle(each, shape, self.shape[1])
        return tokens

    # -------------------------------------------------------------------------------------------- is a tensor right?

    def peers(self, each: Local) -> list[Local]:
        """Return the same tensor of the ranks with the same rows, one per rank."""
        found = {each.rank: each}
        for other in self.at[each.key]:
            is_like = (other.again, other.x.shape) == (each.again, each.x.shape) and same(other.rows, each.rows)
            if is_like and (each.call >= 0 or same(other.columns, each.columns)):
                found.setdefault(other.rank, other)
        return [found[rank] for rank in sorted(found)]

    def readings(self, each: Local) -> Iterator[tuple[list[Local], Tensor, Tensor]]:
        """Yield the tensor itself, and the sum over its peers: the ranks' tensors, their sum, and its columns."""
        peers = self.peers(each) if each.call >= 0 else [each]
        for terms in ([each], peers)[: len(peers)]:
            x = torch.stack([term.x for term in terms]).sum(0)
            is_unknown = each.value is None and each.columns is None
            columns = find(x, each.right[each.rows]) if is_unknown else each.known_columns
            if columns is not None:
                yield terms, x, columns

    def is_right(self, each: Local) -> bool | None:
        """Whether a tensor is a part of the right one; None: it is not known which part it could be."""
        if each.is_right is not None:
            return each.is_right
        if each.rows is None:
            fits = each.x.size(1) == each.right.size(1) or (each.call < 0 and len(each.x) == len(each.right))
            each.is_right = False if fits and not self.right[each.key].is_shared else None
            return each.is_right
        factor = self.factors.get((*each.key[:2], each.rank), 1.0)
        scale = factor * each.right.abs().max().item()
        for terms, x, columns in self.readings(each):
            each.is_right = near(x, factor * each.right[each.rows][:, columns], abs(scale))
            if each.is_right:
                each.columns, each.ranks = columns, tuple(term.rank for term in terms) if len(terms) > 1 else ()
                each.is_right = columns.equal(self.columns_for_weight(each, columns))
                return each.is_right
        each.is_right = False if each.value is None else each.is_right
        return each.is_right

    def columns_for_weight(self, each: Local, columns: Tensor) -> Tensor:
        """Return the columns that the input of a matrix should have, those of its weight in their order; those that it
        has if the weight does not say.
        """
        needed = self.places.get((each.rank, each.key[2], "weight"), (columns, columns))[1]
        is_input = each.key[1] == Phase.FORWARD and each.key[3] == "input"
        return needed if is_input and len(needed) == len(columns) else columns

    def find_factors(self, step: int, phase: Phase) -> None:
        """Find the constant of a step's gradients: a trainer may divide them by the number of targets or ranks at the
        end, and each rank can clip by another norm.
        """
        ratios = dict[int, list[float]]()
        for key in self.keys(step, phase):
            for each in self.at[key]:
                found = (
                    ratio_of(x, each.right[each.rows][:, c]) for _, x, c in self.readings(each) if each.rows is not None
                )
                ratios.setdefault(each.rank, []).extend([c for c in found if c is not None][:1])
            if phase == Phase.BACKWARD and any(ratios.values()):
                every = [c for own in ratios.values() for c in own]
                ratios = dict.fromkeys(range(self.case.world_size), every)
                break
        self.factors |= {(step, phase, rank): statistics.median_low(own) for rank, own in ratios.items() if own}

    def is_beside(self, each: Local) -> bool:
        """Whether a wrong tensor is only computed otherwise: the tensor through which alone it acts is right."""
        step, phase, name, _ = each.key
        if phase in (Phase.LOAD, Phase.UPDATE):
            outputs = self.at.get((step + (phase == Phase.UPDATE), Phase.FORWARD, name, "output"), [])
            return any(o.rank == each.rank for o in outputs) and all(self.is_right(o) for o in outputs)
        if phase not in (Phase.FORWARD, Phase.BACKWARD) or self.right[each.key].is_shared:
            return False
        if each.key[2:] == ANGLES or (each.value is not None and each.value.is_right is False):
            return True
        for key in self.keys(step, phase):
            if self.right[key].is_path and self.right[key].made > self.right[each.key].made:
                after = [o for o in self.at[key] if (o.rank, o.call) == (each.rank, each.call)]
                if after:
                    return all(self.is_right(o) for o in after)
        return False

    # -------------------------------------------------------------------------------------------------- the walk

    def keys(self, step: int, phase: Phase) -> list[Key]:
        """Return the tensors of a phase that are on some rank, in its order."""
        return sorted((key for key in self.at if key[:2] == (step, phase)), key=lambda key: self.right[key].order)

    def first_wrong(self, difference: Difference | None) -> str:
        """Return a sentence about the first wrong tensor; "" if there is none.

        Args:
            difference: the first difference of the ranks' results.
        """
        for step in self.case.steps:
            for phase in Phase:
                if phase in (Phase.BACKWARD, Phase.CLIP):
                    self.find_factors(step, phase)
                key, text = next(
                    ((key, text) for key in self.keys(step, phase) if (text := self.wrong(key))), (None, "")
                )
                if key is not None:
                    ranks = sorted({each.rank for each in self.at[key] if each.is_right is False})
                    where = {"step": step + 1, "phase": phase.name, "module": key[2], "kind": key[3]}
                    self.first = where | {"ranks": ranks}
                if phase == Phase.NORM:
                    text = self.say.clipping(step)
                if difference is not None and (difference.step, difference.name) == (step + 1, ""):
                    is_late = difference.what == "evaluation"  # that of the updated weights
                    if phase == (Phase.UPDATE if is_late else Phase.NORM) and not (is_late and text):
                        text = self.say.number(difference)
                if text:
                    return f"step {step + 1}: {text}"
        return "" if difference is None else f"step {difference.step}: {self.say.number(difference)}"

    def wrong(self, key: Key) -> str:
        """Say what is wrong with a tensor; "" if it is right on every rank, and all of it is on some rank."""
        found = self.at[key]
        right = [each for each in found if self.is_right(each)]
        wrong = [each for each in found if each.is_right is False and not self.is_beside(each)]
        covered = torch.zeros(self.right[key].x.shape, dtype=torch.bool)
        has_places = key[1] in (Phase.LOAD, Phase.FORWARD, Phase.BACKWARD) and not self.right[key].is_shared
        for each in right if has_places else ():
            for peer in self.peers(each) if each.ranks else [each]:
                assert each.rows is not None
                covered[each.rows[:, None], peer.columns] = True
        if right and covered.all():  # nobody misses the tokens of such a trial
            wrong = [each for each in wrong if each.rows is not None]
        if wrong:
            return self.say.wrong(wrong)
        is_complete = covered.all() or not covered.any() or len(right) < len(found)
        if not is_complete:
            return self.say.on_no_rank(key, ~covered)
        return self.say.unequal_shards(key, right) if key[1] == Phase.LOAD and len(right) == len(found) else ""
