"""ZeRO-3: data parallelism in which the ranks divide weights, gradients and the optimizer (Rajbhandari et al. 2019,
arXiv:1910.02054; as PyTorch's FSDP: Zhao et al. 2023, arXiv:2304.11277).

Each rank of a `cp_dp` group owns one slice of every unit: the weights of a decoder layer, of the embedding, or of the
last norm and the head. The weights of a unit exist in full only while they are used:

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
for them would take as much memory as all that zero1 does not divide, which sends less.

In a pipeline, a stage's forwards and backwards alternate, so nearly every action would gather weights. They stay
instead, from their first use to the end of the step: a rank holds 2 bytes more of each parameter, of its stages only,
and sends 2 + 4 m.

An update makes full weights stale, so the optimizer frees them.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, own_slice, start_gather_of_slices, start_reduce_to_slices
from picotron.data_parallel.data_parallel import DataParallel
from picotron.data_parallel.owned_slices import divide
from picotron.model.llama import Llama
from picotron.model.weights import sum_partial_gradients


class Unit:
    """Parameters that are gathered and freed together, as views of one flat buffer, see `owned_slices`.

    Args:
        parameters: parameters of one dtype on one device. If they have no memory, the slice is filled later.
        group: the ranks that own slices.

    Attributes:
        full: the buffer. Its storage has no bytes while the unit is freed. Autograd saves views of this storage in
            forward, which are valid again in backward when the weights have been gathered into the same storage.
        shard: this rank's slice of the weights.
        gradient_shard: this rank's slice of the gradients, in float32 or wider.
        gradients: local gradients that are not reduced yet.
        missing: number of gradients of each parameter that a micro-batch still has to add before the unit is reduced.
        in_backward: whether the backward that uses the weights runs.
        has_previous: whether backward continues with the modules before this one, which need the gradient of its input.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup, used_twice: Collection[nn.Parameter] = ()
    ) -> None:
        self.parameters, self.group, self.used_twice = parameters, group, used_twice
        self.sizes = [parameter.numel() for parameter in parameters]
        first, ranks = parameters[0], dist.get_world_size(group)
        self.full = torch.zeros(-(-sum(self.sizes) // ranks) * ranks, dtype=first.dtype, device=first.device)
        self.own = own_slice(self.full, group)
        self.shard = torch.zeros_like(self.full[self.own])
        self.gradient_shard = torch.zeros_like(self.shard, dtype=accumulation_dtype(first))
        divide(parameters, self.full, self.shard, self.gradient_shard, group, after_update=self.free)
        self.shard.copy_(self.full[self.own])
        self.gradients: dict[Tensor, Tensor] = {}
        self.missing: dict[Tensor, int] = {}
        self.work: dist.Work | None = None
        self.is_full, self.in_backward, self.has_previous = True, False, False
        self.free()

    def start_gather(self) -> None:
        """Start to gather the weights, unless they are there already."""
        if not self.is_full:
            self.is_full = True
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.full[self.own] = self.shard
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
            self.is_full = False
            self.full.untyped_storage().resize_(0)

    def accumulate(self, parameter: Tensor) -> bool:
        """Take a parameter's gradient. Returns whether those of a micro-batch are complete now."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in self.gradients:
            gradient = self.gradients[parameter].to(self.gradient_shard.dtype).add_(gradient)
        self.gradients[parameter] = gradient
        self.missing = self.missing or {p: 1 + (p in self.used_twice) for p in self.parameters if p.requires_grad}
        self.missing[parameter] -= 1
        return max(self.missing.values()) <= 0

    def start_reduction(self) -> Callable[[], None]:
        """Start to average the gradients. Returns a function that waits for it and adds up this rank's slice."""
        buffer = self.full.new_zeros(self.full.shape, dtype=self.gradient_shard.dtype)
        views = buffer[: sum(self.sizes)].split(self.sizes)
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter in self.gradients:
                view.copy_(self.gradients[parameter].flatten())
        self.gradients.clear()
        self.missing.clear()
        work = start_reduce_to_slices(buffer, self.group)

        def finish() -> None:
            if work is not None:
                work.wait()
            self.gradient_shard.add_(buffer[self.own])

        return finish


class DataParallelZero3(DataParallel):
    """Gathers the weights of each unit when they are used. Every parameter that is not frozen must get a gradient in
    each backward.

    Args:
        module: a module that contains a Llama, or some of its layers.
        used_twice: parameters that two pipeline stages of this rank use, so that a micro-batch has two gradients of
            them.
    """

    def __init__(self, module: nn.Module, used_twice: Collection[nn.Parameter] = ()) -> None:
        super().__init__(module, bucket_mb=0.0, parameters_by_stage={})
        grid = pgm.process_group_manager
        self.stays_full = grid.pp_world_size > 1
        self.finish_reduction: Callable[[], None] | None = None
        self.units: list[Unit] = []
        self.unit_of: dict[Tensor, Unit] = {}
        llama: Any = next(each for each in module.modules() if isinstance(each, Llama))
        decoder, hook = llama.model, self._make_hook()
        layers = list(decoder.layers.values())
        groups = [decoder.embed_tokens], *([layer] for layer in layers), [decoder.norm, llama.lm_head]
        for number, group in enumerate(groups):
            modules = [each for each in group if each is not None]
            parameters = dict.fromkeys(p for each in modules for p in each.parameters())
            if unseen := [p for p in parameters if p not in self.unit_of]:
                self.units.append(Unit(unseen, grid.cp_dp_group, used_twice))
                self.unit_of |= dict.fromkeys(unseen, self.units[-1])
            if modules:  # the head has no hook: it runs after the norm
                units = list(dict.fromkeys(self.unit_of[p] for p in parameters))
                modules[0].register_forward_pre_hook(functools.partial(self._before_forward, units, max(number - 1, 0)))
        for layer in layers:
            layer.register_forward_hook(self._after_layer)
        embedding, head = decoder.embed_tokens, llama.lm_head
        self.head_units = [] if head is None else list(dict.fromkeys(map(self._unit_of, (head, decoder.norm))))
        if embedding is not None and (head is None or head.weight is not embedding.weight):
            embedding.register_forward_hook(lambda *_: self._free(self.units[0]))  # backward does not need its weights
        for parameter in self.unit_of:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)
        self.layer_units = [self._unit_of(layer) for layer in layers]

    def _unit_of(self, module: nn.Module) -> Unit:
        return self.unit_of[next(module.parameters())]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        # Backward begins with the units that forward used last.
        first = self.layer_units[-1:] + self.head_units if torch.is_grad_enabled() else []
        for unit in self.units:
            if unit not in first:
                self._free(unit)
        return output

    def _free(self, unit: Unit) -> None:
        if not self.stays_full:
            unit.free()

    def _before_forward(self, units: list[Unit], layer: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Gather the units of a layer, of the embedding or of the head, and start to gather that of the next module.

        Args:
            layer: number of layers of this rank before the module.
        """
        for unit in units:
            unit.gather()
        if units[0].in_backward:  # activation checkpointing computes forward again in backward
            return
        for unit in self.units[self.units.index(units[0]) + 1 :][:1]:
            unit.start_gather()
        units[0].has_previous = inputs[0].requires_grad
        if inputs[0].requires_grad and not self.stays_full:
            inputs[0].register_hook(lambda gradient: self._after_backward(units, layer))

    def _after_layer(self, layer: nn.Module, _: Any, output: Tensor) -> None:
        self._finish_reduction()  # the last one of the micro-batch before, meanwhile this layer has computed
        unit = self._unit_of(layer)
        if unit.in_backward:
            return
        if not output.requires_grad or unit is not self.layer_units[-1]:
            self._free(unit)

    def _after_backward(self, units: list[Unit], layer: int) -> None:
        """Free the units of a module whose backward is complete, and gather those of the layer before it."""
        for unit in units:
            unit.in_backward = False
            unit.free()
        for previous in self.layer_units[:layer][-1:]:
            previous.in_backward = True
            previous.gather()
        for following in self.layer_units[:layer][-2:-1]:
            following.start_gather()

    def _accumulate(self, parameter: Tensor) -> None:
        """Take `parameter.grad`, and reduce the gradients of its unit when all of them are there."""
        if parameter.grad is not None and self.unit_of[parameter].accumulate(parameter):
            self._start_reduction(self.unit_of[parameter])

    def _start_reduction(self, unit: Unit) -> None:
        if not unit.has_previous:  # backward ends here
            unit.in_backward = False
            self._free(unit)
        self._finish_reduction()  # so at most one buffer of full gradients exists
        self.finish_reduction = unit.start_reduction()

    def _finish_reduction(self) -> None:
        if self.finish_reduction is not None:
            self.finish_reduction()
            self.finish_reduction = None

    def bytes_held(self) -> tuple[int, int]:
        return sum(unit.shard.nbytes for unit in self.units), sum(unit.gradient_shard.nbytes for unit in self.units)

    def start_grad_sync(self, stage: int) -> None:
        """Do nothing: the gradients of each micro-batch are reduced when they are complete."""

    def finish_grad_sync(self) -> None:
        """Wait until this rank's slice of every gradient is the average, and free all full weights."""
        for unit in self.units:
            if unit.gradients:  # the backward of a zero-bubble schedule computes gradients of norms earlier than others
                self._start_reduction(unit)
        self._finish_reduction()
        for unit in self.units:
            unit.in_backward = False
            unit.free()
        sum_partial_gradients(self.module)
