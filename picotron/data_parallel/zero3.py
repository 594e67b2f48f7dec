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

How does a unit know when its weights are used? In forward, a hook of each of its modules runs before the module. In
backward, autograd asks for what forward has saved: for a weight, forward saves its place in the unit, not its values,
so the request is the moment to gather (`torch.autograd.graph.saved_tensors_hooks`). And when all gradients of a unit
have arrived, its weights are no longer needed. Which unit comes next, to be gathered in advance, is known from the
micro-batch before.
"""

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, own_slice, start_gather_of_slices, start_reduce_to_slices
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallel, Update
from picotron.data_parallel.zero1 import divide
from picotron.model.placement import placement

LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential


class Unit:
    """Parameters that are gathered and freed together, as views of one flat buffer, see `OwnedSlice`.

    Args:
        parameters: parameters of one dtype on one device. If they have no memory, the slice is filled later.
        group: the ranks that own slices.
        used_twice: parameters of which a micro-batch has two gradients.

    Attributes:
        full: the buffer, which has no elements while the unit is freed. An operation or a graph that still holds a view
            of the buffer keeps its memory.
        freed: NaN, which all weights are while the unit is freed. Their shapes remain.
        shard: this rank's slice of the weights.
        gradient_shard: this rank's slice of the gradients, in float32 or wider.
        gradients: local gradients that are not reduced yet.
        arrived: number of gradients of each parameter since the last reduction. In a zero-bubble schedule, those of
            norms come earlier than others, so more than one can be there; the surplus counts for the next reduction.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup, used_twice: Collection[nn.Parameter] = ()
    ) -> None:
        self.parameters, self.group, self.used_twice = parameters, group, used_twice
        self.sizes = [parameter.numel() for parameter in parameters]
        first, ranks = parameters[0], dist.get_world_size(group)
        self.full = torch.zeros(-(-sum(self.sizes) // ranks) * ranks, dtype=first.dtype, device=first.device)
        self.own, self.size = own_slice(self.full, group), len(self.full)
        self.freed = self.full.new_full((), math.nan if first.is_floating_point() else 0)
        self.shard = torch.zeros_like(self.full[self.own])
        self.gradient_shard = torch.zeros_like(self.shard, dtype=accumulation_dtype(first))
        divide(parameters, self.full, self.shard, self.gradient_shard, group)
        self.shard.copy_(self.full[self.own])
        self.gradients: dict[Tensor, Tensor] = {}
        self.arrived: Counter[Tensor] = Counter()
        self.work: dist.Work | None = None
        self.is_full = True
        self.free()

    def start_gather(self) -> None:
        """Start to gather the weights, unless they are there already."""
        if not self.is_full:
            self.is_full, self.full = True, self.shard.new_empty(self.size)
            self.full[self.own] = self.shard
            for parameter, view in zip(self.parameters, self._views(self.full), strict=True):
                parameter.data = view.view(parameter.shape)
            self.work = start_gather_of_slices(self.full, self.group)

    def gather(self) -> None:
        """Gather the weights, and wait for them."""
        self.start_gather()
        if self.work is not None:
            self.work.wait()
            self.work = None

    def free(self) -> None:
        """Free the full weights."""
        if self.is_full:
            self.gather()  # wait, if the weights are still on their way
            self.is_full, self.full = False, self.full.new_empty(0)
            for parameter in self.parameters:
                parameter.data = self.freed.expand(parameter.shape)

    def _views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        return buffer[: sum(self.sizes)].split(self.sizes)

    def accumulate(self, parameter: Tensor) -> bool:
        """Take a parameter's gradient. Returns whether those of a micro-batch are complete now."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self.gradients:
            gradient = self.gradients[parameter].to(self.gradient_shard.dtype).add_(gradient)
        self.gradients[parameter] = gradient
        self.arrived[parameter] += 1
        return all(self.arrived[p] >= times for p, times in self._of_a_micro_batch().items())

    def _of_a_micro_batch(self) -> dict[Tensor, int]:
        return {p: 1 + (p in self.used_twice) for p in self.parameters if p.requires_grad}

    def start_reduction(self) -> Callable[[], None]:
        """Start to average the gradients. Returns a function that waits for it and adds up this rank's slice."""
        buffer = self.gradient_shard.new_zeros(self.size)
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


class ReadParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, with a function that is called when code that is not compiled reads one of them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], on_read: Callable[[Tensor], None]) -> None:
        super().__init__(parameters)
        self.on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        if (parameter := super().__getitem__(name)) is not None and not torch.compiler.is_compiling():
            self.on_read(parameter)
        return parameter


class DataParallelZero3(DataParallel):
    """Gathers the weights of each unit when they are used: in forward by hooks of the unit's modules, and in backward
    by hooks of autograd, which is given the place of a weight to save instead of its values. Weights that are read
    elsewhere, in forward or in a part of it that activation checkpointing computes again, are gathered when read.

    Gathers and reductions are collectives, so all ranks of a `cp_dp` group must run the same modules in the same order,
    and use the same parameters; `train_batch` allows losses that use the head on some ranks only. (With `torch.func`,
    autograd has no such hooks.)

    Args:
        module: any module. Its buffers stay as they are.
        units: groups of modules, by default `members_of_lists`. By a predicate:
            `[[each] for each in module.modules() if isinstance(each, Block)]`. The parameters of a group form a unit,
            without those of modules inside that are in another group; those of no group form a unit that is full during
            the whole forward. The first module of a group that runs must be called, because hooks gather the weights.
        used_twice: parameters that two pipeline stages of this rank use, so that a micro-batch has two gradients of
            them.

    Attributes:
        shared: units of which several groups use parameters. They stay full from their first use to the end of forward.
        running: in forward, the shared units and those of the modules that run. They are not freed.
        recomputing, recomputed: node of the graph for which activation checkpointing computes a part of forward again,
            and the units of this part. They are not freed either: it holds frozen parameters, not views.
        uses: the units that this micro-batch has used, forward and backward, in order.
        expected: the uses of the micro-batch before; at first, the given order and back. The next use is gathered in
            advance, and the next two are not freed.
        position: number of `expected` uses that have been there.
        owners: units by the `storage_key` of their weights.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Sequence[nn.Module]] | None = None,
        used_twice: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__(module, bucket_mb=0.0)
        grid = pgm.process_group_manager
        self.stays_full = grid.pp_world_size > 1
        self.finish_reduction: Callable[[], None] | None = None
        self.units: list[Unit] = []
        self.unit_of: dict[Tensor, Unit] = {}
        # A parameter that another pipeline stage also holds has a separate unit, so that the ranks of both stages own
        # the same elements: `sum_tied_gradients` adds their gradients.
        numbered = enumerate(module.parameters(), 1)
        kinds = {p: (str(p.dtype), str(p.device), i if placement(p).is_tied else 0) for i, p in numbered}
        groups = [*(members_of_lists(module) if units is None else units), [module]]
        separate = {each for group in groups for each in group}
        used: list[tuple[Unit, ...]] = []
        for group in groups:
            parameters = dict.fromkeys(p for each in group for p in own_parameters(each, separate))
            unseen = sorted((p for p in parameters if p not in self.unit_of), key=kinds.__getitem__)
            for _, alike in itertools.groupby(unseen, kinds.__getitem__):
                unit = Unit(list(alike), grid.cp_dp_group, used_twice)
                self.units.append(unit)
                self.unit_of |= dict.fromkeys(unit.parameters, unit)
            if parameters:
                used.append(tuple(dict.fromkeys(self.unit_of[p] for p in parameters)))
                for each in group:
                    each.register_forward_pre_hook(lambda *_, units=used[-1]: self._before_forward(units))
                    each.register_forward_hook(self._after_forward, always_call=True)
        self.hooks = [p.register_post_accumulate_grad_hook(self._accumulate) for p in self.trained]
        for each in module.modules():
            each._parameters = ReadParameters(each._parameters, self._access)
            each.register_state_dict_pre_hook(self._before_state_dict)
            each.register_load_state_dict_pre_hook(self._before_load_state_dict)
        uses = Counter(unit for units in used for unit in units)
        self.shared = tuple(unit for unit, count in uses.items() if count > 1)
        self.running: list[tuple[Unit, ...]] = []
        self.recomputing: Any = None
        self.recomputed: list[tuple[Unit, ...]] = []
        self.uses: list[tuple[Unit, ...]] = []
        self.expected, self.position = [*used, *used[-2:0:-1]], 0
        self.owners: dict[int, Unit] = {}

    def _parameters_by_stage(self) -> dict[int, list[nn.Parameter]]:
        return {}  # units take the place of buckets

    def _before_state_dict(self, *_: Any) -> None:
        if not all(unit.is_full for unit in self.units):
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
            self.expected = self.uses or self.expected
        self.uses, self.position, self.owners, self.running = [], 0, {}, [self.shared]
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooks = saved_tensors_hooks(functools.partial(self._pack, outer), lambda saved: saved())
        with contextlib.nullcontext() if self.stays_full else hooks:
            output = super().forward(*args, **kwargs)
        self.running = []
        if not torch.is_grad_enabled():
            self.uses, self.position = [], len(self.expected)
        self._free_others()
        return output

    def _before_forward(self, units: tuple[Unit, ...]) -> None:
        if torch._C._current_autograd_node() is None:
            self.running.append(units)
            self._use(units)
        else:
            self._recompute(units)

    def _after_forward(self, *_: Any) -> None:
        if torch._C._current_autograd_node() is None:
            self.running.pop()
        if len(self.uses) > 1:
            self._finish_reduction()  # the last one of the micro-batch before, meanwhile modules have computed

    def _recompute(self, units: tuple[Unit, ...]) -> None:
        """Gather units that backward needs to compute a part of forward again, and keep them until the next part."""
        if (node := torch._C._current_autograd_node()) is not self.recomputing:
            self.recomputing, self.recomputed = node, []
        self.recomputed.append(units)
        self._use(units)

    def _access(self, parameter: Tensor) -> None:
        """Gather a parameter that a module's code reads: it can be that of another module, or its own in backward."""
        if (unit := self.unit_of.get(parameter)) is None:
            return
        if torch._C._current_autograd_node() is not None:
            self._recompute((unit,))
        elif self.running and not (unit.is_full and unit.work is None):
            self._use((unit,))

    def _pack(self, outer: tuple[Callable[..., Any], Callable[..., Tensor]] | None, tensor: Tensor) -> Any:
        """Return what autograd saves instead of a tensor: a function that returns it, and gathers it if it is a weight.

        Args:
            outer: hooks of the caller for the tensors that are not weights.
        """
        unit = self.owners.get(key := storage_key(tensor))
        if unit is not None and key == storage_key(unit.full) and tensor.dtype == unit.full.dtype:
            return functools.partial(self._weight, unit, tensor.shape, tensor.stride(), tensor.storage_offset())
        if outer is None:
            return functools.partial(unchanged, tensor.detach(), tensor._version)
        return functools.partial(outer[1], outer[0](tensor))

    def _weight(self, unit: Unit, *place: Any) -> Tensor:
        self._use((unit,))
        return unit.full.as_strided(*place)

    def _use(self, units: tuple[Unit, ...]) -> None:
        """Gather units that are used now, start to gather the next ones, and free those that are not used soon."""
        is_next = not (self.uses and set(units) <= set(self.uses[-1]))
        if is_next:
            self.uses.append(units)
            with contextlib.suppress(ValueError):  # not expected
                self.position = self.expected.index(units, self.position) + 1
            self._free_others()
        for unit in units:
            unit.gather()
            self.owners[storage_key(unit.full)] = unit
        if is_next:
            for unit in itertools.chain(*self.expected[self.position :][:1]):
                unit.start_gather()

    def _free_others(self) -> None:
        """Free the units that are not used soon."""
        if not self.stays_full:
            soon = self.uses[-1:] + self.expected[self.position :][:2]
            for unit in set(self.units).difference(*soon, *self.running, *self.recomputed):
                unit.free()

    def _accumulate(self, parameter: Tensor) -> None:
        """Take `parameter.grad`, and reduce the gradients of its unit when all of them are there."""
        if parameter.grad is not None and self.unit_of[parameter].accumulate(parameter):
            self._start_reduction(self.unit_of[parameter])

    def _start_reduction(self, unit: Unit) -> None:
        if not self.stays_full and all(parameter.requires_grad for parameter in unit.parameters):
            unit.free()
        self._finish_reduction()  # so at most one buffer of full gradients exists
        self.finish_reduction = unit.start_reduction()

    def _finish_reduction(self) -> None:
        if self.finish_reduction is not None:
            self.finish_reduction()
            self.finish_reduction = None

    def _finish_backward(self) -> None:
        """Reduce the gradients of units with unused parameters, which are not complete, and free all full weights."""
        self.recomputing, self.recomputed = None, []
        for unit in self.units:
            if unit.gradients:
                self._start_reduction(unit)
            unit.arrived.clear()
            unit.free()

    def bytes_held(self) -> tuple[int, int]:
        return sum(unit.shard.nbytes for unit in self.units), super().bytes_held()[1]

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

    def update_in_parts(self, update: Update) -> None:
        super().update_in_parts(update)
        for unit in self.units:
            unit.free()  # its full weights are the old ones

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


def storage_key(tensor: Tensor) -> int:
    """Return a number that a tensor shares with its views, and with no other tensor at the same time."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor. Raises RuntimeError if it is not the given version, which autograd checks only without hooks."""
    if tensor._version != version:
        raise RuntimeError(f"a tensor {list(tensor.shape)} that backward needs was modified in place; copy it before")
    return tensor


def own_parameters(module: nn.Module, separate: Collection[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of a module, without those of the modules inside that are `separate`."""
    inside = (own_parameters(child, separate) for child in module.children() if child not in separate)
    return [*module.parameters(recurse=False), *itertools.chain(*inside)]
