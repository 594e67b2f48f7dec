"""ZeRO-3: data parallelism in which the ranks divide weights, gradients and the optimizer (Rajbhandari et al. 2019,
arXiv:1910.02054; as PyTorch's FSDP: Zhao et al. 2023, arXiv:2304.11277).

Each rank of a `cp_dp` group owns one slice of every unit, the weights of some modules: of a Llama, those of a decoder
layer, of the embedding, or of the last norm and the head. The weights of a unit exist in full only while they are used:

    forward of a layer      gather its weights; meanwhile, the layer before it computes
                            compute, and free the weights
    backward of a layer     gather its weights; meanwhile, the layer after it computes
                            compute, and free the weights
                            average the gradients and keep a slice; meanwhile, the layer before it computes

Bytes of a bfloat16 parameter, held between steps and sent in a step of m micro-batches:

                weight   gradient   master weight   two moments   held       sent, times (n - 1)/n
    bucket        2         4            4              8         18         4 + 4
    zero1         2         4           4/n            8/n        6 + 12/n   4 + 2
    zero3        2/n       4/n          4/n            8/n        18/n       (2 + 2 + 4) m

Slices of the gradients accumulate in float32 over micro-batches, so each micro-batch sends its gradients. A full buffer
for the sums would save these messages, but take 4 bytes of each parameter. Zero1 does not divide 6 bytes, and sends
less.

In a pipeline, a stage's forwards and backwards alternate, so nearly every action would gather weights. They stay
instead, from their first use to the end of the step: a rank holds 2 bytes more of each parameter, of its stages only,
and sends 2 + 4 m.

An update makes full weights stale, so the optimizer frees them.

How does a unit know when its weights are used? A hook runs before each module in forward, and another one in backward
when the gradient of the module's output has arrived. When all gradients of a unit have arrived, its weights are no
longer needed.

Where do the weights go in backward? The graph holds the tensors that forward has used, views of the unit's buffer. So
the buffer stays, and only its memory comes and goes: a freed buffer has a storage of size 0.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.console import UserError
from picotron.data_parallel.data_parallel import Bucket, DataParallel
from picotron.data_parallel.guards import check_not_replaced, names_of
from picotron.model.placement import placement, replicas
from picotron.tensor_parallel.tensor_parallel import VocabParallelEmbedding
from workbench.variants.zero1 import divide, own_slice, start_gather_of_slices, start_reduce_to_slices

LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
EMBEDDINGS = nn.Embedding, VocabParallelEmbedding  # modules that need no weights in backward


class Unit:
    """Parameters that are gathered and freed together, as views of one flat buffer, see `OwnedSlice`.

    Args:
        parameters: parameters of one dtype on one device. If they have no memory, the slice is filled later.
        module: the module that has them, for errors.

    Attributes:
        full: the buffer, whose storage has no bytes while the unit is freed.
        freed: NaN, which all weights are while the unit is freed. Their shapes remain.
        shard: this rank's slice of the weights.
        gradient_shard: this rank's slice of the gradients, in float32 or wider.
        gradients: local gradients that are not reduced yet.
        arrived: number of gradients of each parameter since the last reduction. In a zero-bubble schedule, those of
            norms come earlier than others, so more than one can be there; the surplus counts for the next reduction.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        module: nn.Module,
    ) -> None:
        self.parameters, self.group, self.module = parameters, replicas(parameters[0]), module
        self.sizes = [parameter.numel() for parameter in parameters]
        first, ranks = parameters[0], dist.get_world_size(self.group)
        self.full = torch.zeros(-(-sum(self.sizes) // ranks) * ranks, dtype=first.dtype, device=first.device)
        self.own = own_slice(self.full, self.group)
        self.freed = self.full.new_full((), math.nan if first.is_floating_point() or first.is_complex() else 0)
        self.shard = torch.zeros_like(self.full[self.own])
        self.gradient_shard = torch.zeros_like(self.shard, dtype=accumulation_dtype(first))
        divide(parameters, self.full, self.shard, self.gradient_shard, self.group)
        self.shard.copy_(self.full[self.own])
        self.gradients: dict[Tensor, Tensor] = {}
        self.arrived: Counter[Tensor] = Counter()
        self.work: dist.Work | None = None
        self.is_full, self.is_coming = True, False
        self.versions = [parameter._version for parameter in parameters]
        self.free()

    def start_gather(self) -> None:
        """Start to gather the weights, unless they are there already."""
        if not self.is_full:
            self._check(self.freed)
            self.is_full = self.is_coming = True
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.full[self.own] = self.shard
            self.work = start_gather_of_slices(self.full, self.group)

    def gather(self) -> None:
        """Gather the weights, and wait for them. Until they are there, whoever reads them finds NaN."""
        self.start_gather()
        if self.is_coming:
            if self.work is not None:
                self.work.wait()
            for parameter, view in zip(self.parameters, self._views(self.full), strict=True):
                parameter.data = view.view(parameter.shape)
            self.work, self.is_coming = None, False
            self.versions = [parameter._version for parameter in self.parameters]

    def free(self) -> None:
        """Free the full weights."""
        if self.is_full:
            self.gather()  # wait, if the weights are still on their way
            self._check(self.full)
            self.is_full = False
            self.full.untyped_storage().resize_(0)
            for parameter in self.parameters:
                parameter.data = self.freed.expand(parameter.shape)
            self.versions = [parameter._version for parameter in self.parameters]

    def _check(self, buffer: Tensor) -> None:
        """Raise UserError if a weight was changed in place, which leaves `shard` as it is, or if its data are not in
        `buffer`.
        """
        check_not_replaced(self.parameters, buffer, self.module)
        for parameter, version in zip(self.parameters, self.versions, strict=True):
            if parameter._version != version:
                raise UserError(
                    f"{names_of(self.module).get(parameter, 'a weight')} was changed in place, which ZeRO-3 would lose; change "
                    f"weights before the module is wrapped, or use another dp_engine"
                )

    def _views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        return buffer[: sum(self.sizes)].split(self.sizes)

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Take a parameter's gradient. Returns whether those of a micro-batch are complete now."""
        if parameter in self.gradients:
            gradient = self.gradients[parameter].to(self.gradient_shard.dtype).add_(gradient)
        self.gradients[parameter] = gradient
        self.arrived[parameter] += 1
        return all(self.arrived[p] >= times for p, times in self._of_a_micro_batch().items())

    def _of_a_micro_batch(self) -> dict[Tensor, int]:
        return {p: placement(p).uses for p in self.parameters if p.requires_grad}

    def start_reduction(self) -> Callable[[], None]:
        """Start to average the gradients. Returns a function that waits for it and adds up this rank's slice."""
        buffer = self.gradient_shard.new_zeros(len(self.full))
        for parameter, view in zip(self.parameters, self._views(buffer), strict=True):
            if parameter in self.gradients:
                view.copy_(self.gradients[parameter].flatten())
        self.gradients.clear()
        self.arrived.subtract(self._of_a_micro_batch())
        work = start_reduce_to_slices(buffer, self.group)

        def finish() -> None:
            if work is not None:
                work.wait()
            self.gradient_shard.add_(buffer[self.own])

        return finish


Units = tuple[Unit, ...]  # of a module that is in `units`, or of some


class DataParallelZero3(DataParallel):
    """Gathers the weights of each unit when its modules are called, and again for their backward.

    Gathers and reductions are collectives, so all ranks of a `cp_dp` group must run the same modules in the same order,
    and use the same parameters; `train_batch` allows losses that use the head on some ranks only.

    Args:
        module: a module whose weights are read by the modules that hold them, when they are called, and by no others:
            other reads find NaN. Its buffers stay as they are.
        units: groups of modules that are called one after the other, by default `members_of_lists`. The parameters of a
            group form a unit; those of no group form a unit that is full during a whole micro-batch. The last group may
            have modules that are not called, but whose weights a loss reads.

    Attributes:
        groups: the units that each group uses. Usually one; a weight that several groups share has a unit of its own.
        shared: units that several groups use. They stay full from their first use to the end of forward.
        rest: units of the parameters of no group.
        running: stack of the units that the modules whose forward is running need; the entry of an inner module has
            the units of the modules around it, too.
        latest: the units that were used last in this forward.
        awaited: the groups whose outputs get a gradient in this micro-batch, in the order of forward.
        keeps: whether weights stay full until the end of the micro-batch: a graph of its backward will need them again.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Sequence[nn.Module]] | None = None,
    ) -> None:
        super().__init__(module, bucket_mb=0.0)
        grid = pgm.process_group_manager
        self.stays_full = grid.pp_world_size > 1
        self.finish_reduction: Callable[[], None] | None = None
        self.units: list[Unit] = []
        self.unit_of: dict[Tensor, Unit] = {}
        # A parameter that another pipeline stage also holds has a separate unit, so that the ranks of both stages own
        # the same elements, of which they have parts of the gradient.
        numbered = enumerate(module.parameters(), 1)
        of_replicas = {group: i for i, group in enumerate(dict.fromkeys(map(replicas, module.parameters())))}
        kinds = {
            p: (str(p.dtype), str(p.device), of_replicas[replicas(p)], i if placement(p).is_tied else 0)
            for i, p in numbered
        }
        groups = members_of_lists(module) if units is None else units
        self.groups: list[Units] = []
        for group in [*groups, [module]]:
            parameters = dict.fromkeys(p for each in group for p in each.parameters())
            unseen = sorted((p for p in parameters if p not in self.unit_of), key=kinds.__getitem__)
            for _, alike in itertools.groupby(unseen, kinds.__getitem__):
                unit = Unit(list(alike), module)
                self.units.append(unit)
                self.unit_of |= dict.fromkeys(unit.parameters, unit)
            self.groups.append(tuple(dict.fromkeys(self.unit_of[p] for p in parameters)))
        self.groups.pop()  # the module itself
        for number, group in enumerate(groups):
            for each in group:
                before, after = (
                    functools.partial(self._before_forward, number),
                    functools.partial(self._after_forward, number),
                )
                self.hooks += [each.register_forward_pre_hook(before, prepend=True), each.register_forward_hook(after)]
        self._take_gradients_of(p for p in self.unit_of if p.requires_grad)
        for each in module.modules():
            self.hooks.append(each.register_state_dict_pre_hook(self._before_state_dict))
            self.hooks.append(each.register_load_state_dict_pre_hook(self._before_load_state_dict))
        uses = Counter(unit for group in self.groups for unit in group)
        self.shared = tuple(unit for unit, count in uses.items() if count > 1)
        self.rest = tuple(unit for unit in self.units if unit not in uses)
        self.running: list[Units] = []
        self.latest: Units = ()
        self.awaited: list[Units] = []
        self.keeps = False

    def close(self) -> None:
        try:
            self._finish_reduction()
            for unit in self.units:
                unit.gather()
        finally:
            super().close()

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        return []  # units take their place

    def _before_state_dict(self, *_: Any) -> None:
        if any(unit.is_coming or not unit.is_full for unit in self.units):
            raise UserError(
                "with ZeRO-3, ranks hold slices of the weights; before state_dict, call gather() of each of the wrapper's "
                "`units` on all ranks"
            )

    def _before_load_state_dict(self, *_: Any) -> None:
        raise UserError(
            "with ZeRO-3, ranks hold slices of the weights; call load_state_dict before the module is wrapped"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.stays_full:
            self._finish_backward()
            self.awaited, self.latest = [], ()
        self.running = []  # also after a forward that raised
        for unit in self.rest:
            unit.gather()
        output = super().forward(*args, **kwargs)
        # Of the loss, whose backward needs the weights of the last group, and of modules in no group.
        self._await_gradients(output, self.latest, self.rest)
        if not torch.is_grad_enabled() and not self.stays_full:
            self._free_all_but(())
        return output

    @torch.compiler.disable  # `module.compile()` would compile its hooks with it
    def _before_forward(self, number: int, *_: Any) -> None:
        """Gather the units of a group that is called, and start to gather those of the next one: after the last group
        comes the backward of the group before it.
        """
        if torch._C._current_autograd_node() is None:
            self.latest = (*self.groups[number], *itertools.chain(*self.running[-1:]))
            self.running.append(self.latest)
            following = self.groups[number + 1 : number + 2] or self.awaited[-1:]
            self._use(self.latest, following, kept=self.shared)
        else:  # activation checkpointing computes a part of forward again
            for unit in self.groups[number]:
                unit.gather()

    @torch.compiler.disable
    def _after_forward(self, number: int, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_autograd_node() is not None:
            return
        group = self.running.pop()
        if number > 0:
            self._finish_reduction()  # the last one of the micro-batch before, meanwhile modules have computed
        memory = {unit.full.untyped_storage()._cdata for unit in group}
        dense = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.layout == torch.strided)
        if any(x.untyped_storage()._cdata in memory for x in dense):
            raise UserError(
                f"{type(module).__name__} returns a part of its weights, whose memory ZeRO-3 frees; return a copy, by clone()"
            )
        if type(module) not in EMBEDDINGS:
            self._await_gradients(output, group)

    def _await_gradients(self, outputs: Any, group: Units, rest: Units = ()) -> None:
        """Gather the units of a group when a gradient of its outputs arrives, with those in `rest`, and start to gather
        those of the group before it.
        """
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
        if self.stays_full or not tensors:
            return
        if not self.awaited or self.awaited[-1] != group:
            self.awaited.append(group)
        before = self.awaited[-2:-1]

        def gather(_: Tensor) -> None:
            self.keeps |= torch.is_grad_enabled()  # with create_graph
            self._use(group, before)
            for unit in rest:
                unit.gather()

        for each in tensors:
            each.register_hook(gather)

    def _use(self, group: Collection[Unit], following: Sequence[Collection[Unit]], kept: Collection[Unit] = ()) -> None:
        """Gather units that are used now, start to gather those that are used next, and free all others."""
        soon = [unit for units in following for unit in units]
        if not self.stays_full:
            self._free_all_but([*group, *soon, *kept, *self.rest])
        for unit in group:
            unit.gather()
        for unit in soon:
            unit.start_gather()

    def _free_all_but(self, kept: Collection[Unit]) -> None:
        for unit in self.units:
            if unit not in kept and not self.keeps:
                unit.free()

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        """Reduce the gradients of the parameter's unit when all of them are there."""
        if self.unit_of[parameter].accumulate(parameter, gradient):
            self._start_reduction(self.unit_of[parameter])

    def _start_reduction(self, unit: Unit) -> None:
        if not (self.stays_full or self.keeps) and all(parameter.requires_grad for parameter in unit.parameters):
            unit.free()
        self._finish_reduction()  # so at most one buffer of full gradients exists
        self.finish_reduction = unit.start_reduction()

    def _finish_reduction(self) -> None:
        if self.finish_reduction is not None:
            self.finish_reduction()
            self.finish_reduction = None

    def _finish_backward(self) -> None:
        """Reduce the gradients of units with unused parameters, which are not complete, and free all full weights."""
        for unit in self.units:
            if unit.gradients:
                self._start_reduction(unit)
            unit.arrived.clear()
            unit.free()
        self.keeps = False

    def gradient_buffers(self) -> list[Tensor]:
        self._finish_reduction()
        local = [gradient for unit in self.units for gradient in unit.gradients.values()]
        return [*local, *(unit.gradient_shard for unit in self.units)]

    def start_grad_sync(self, stage: int) -> None:
        """Do nothing: the gradients of each micro-batch are reduced when they are complete."""

    def finish_grad_sync(self) -> None:
        """Wait until this rank's slice of every gradient is the average, and free all full weights."""
        self._finish_backward()
        self._finish_reduction()
        super().finish_grad_sync()

    def parts(self) -> Iterator[list[nn.Parameter]]:
        """Yield all parameters, of which this rank updates its slices.

        Raises:
            UserError: a gradient is NaN. (Not on a GPU, for which the CPU would have to wait.)
        """
        gradients = [unit.gradient_shard for unit in self.units]
        if gradients and gradients[0].device.type == "cpu":
            has_nan = torch.stack([gradient.isnan().any() for gradient in gradients]).any().float()
            all_reduce(has_nan, pgm.process_group_manager.cp_dp_group)
            if has_nan:
                raise UserError(
                    "gradients are NaN. If they are not with another dp_engine, a weight was read outside of the module that "
                    "holds it, where ZeRO-3 has freed it: read it in that module's forward, or use zero1"
                )
        yield from super().parts()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for unit in self.units:
            unit.gradients.clear()
        self._finish_backward()
        super().zero_grad()


def members_of_lists(module: nn.Module) -> list[list[nn.Module]]:
    """Return the default units: each member of the outermost `ModuleList`s, `ModuleDict`s and `Sequential`s."""
    found = []
    for child in module.children():
        if isinstance(module, LISTS) and not isinstance(child, LISTS[:2]):  # which have no forward
            found.append([child])
        else:
            found += members_of_lists(child)
    return found
