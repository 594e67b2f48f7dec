"""Expert parallelism (Lepikhin et al. 2020, arXiv:2006.16668): the ranks of an `ep` group, which process different
tokens, each hold some of the experts of a layer, and send each other the rows that these compute.

An `ep` group are n consecutive ranks of a `cp_dp` group; rank r holds the E/n experts from r E/n on. Two all-to-alls in
forward, and two in backward:

    rows, sorted by expert  ->  to the rank of the expert  ->  its experts  ->  back to the rank of the token

So an expert's gradient has the tokens of all ranks of its `ep` group already. The ranks that hold the same expert, one
in each `ep` group, are its `edp` group, over which its gradient is averaged, and divided by n, see `Placement`.
"""

import functools
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from picotron import process_group_manager as pgm
from picotron.model.llama import Llama
from picotron.model.placement import place
from picotron.process_group_manager import ProcessGroupManager, new_groups
from workbench.variants.experts import Experts, Permute, run_experts

Groups = dict[str, dist.ProcessGroup | None]  # by their names, "ep" and "edp"
expert_groups: MutableMapping[ProcessGroupManager, Groups] = WeakKeyDictionary()


class Exchange(torch.autograd.Function):
    """forward: send sent[i] rows to rank i of a group, and receive received[i] from it. backward: send the gradients
    back.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.size(1))
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(dy, *ctx.back), None, None, None


def run_on_ranks(experts: nn.ModuleDict, rows: Tensor, counts: Tensor, group: Any) -> Tensor:
    """Compute rows, see `run_experts`, of which `counts` has the numbers for all experts of the group's ranks."""
    # In backward, all ranks exchange or none. So each tells the others, in a last column, whether it needs to.
    trains = rows.requires_grad or any(parameter.requires_grad for parameter in experts.parameters())
    leaving = F.pad(counts.view(dist.get_world_size(group), -1), (0, 1), value=trains)  # by rank and its expert
    arriving = torch.empty_like(leaving)  # by the rank that sends the rows, and by this rank's expert
    dist.all_to_all_single(arriving, leaving, group=group)
    sums = torch.stack([leaving[:, :-1].sum(1), arriving[:, :-1].sum(1), arriving[:, -1]])
    sent, received, trained = sums.tolist()  # a GPU is waited for once
    if torch.is_grad_enabled() and any(trained):
        rows.requires_grad_()
    arriving = arriving[:, :-1]
    expert = torch.arange(arriving.size(1), device=arriving.device).repeat(len(arriving))
    order = expert.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
    inverse = order.argsort()
    # All steps use one name, so that the rows of the step before are freed as soon as possible.
    rows = Permute.apply(Exchange.apply(rows, sent, received, group), order, inverse)
    rows = run_experts(experts, rows, arriving.sum(0))
    rows = Permute.apply(rows, inverse, order)
    returned: Tensor = Exchange.apply(rows, received, sent, group)
    return returned


def keep_experts(model: Llama, ep_size: int) -> None:
    """Keep this rank's experts of a Llama on the meta device. `ep_size` divides the number of experts."""
    grid = pgm.process_group_manager
    cp_dp = grid.grid.permute(1, 3, 0, 2).flatten(2)  # a row of ranks for each cp_dp group
    groups = cp_dp.unflatten(2, (-1, ep_size)).flatten(0, 1)  # (rows, ep groups of a row, ep_size)
    ep_group = new_groups(groups.flatten(0, 1).tolist())
    edp_group = new_groups(groups.transpose(1, 2).flatten(0, 1).tolist())
    expert_groups[grid] = {"ep": ep_group, "edp": edp_group}
    for block in (module for module in model.modules() if isinstance(module, Experts)):
        held = block.number // ep_size
        first = grid.cp_dp_rank % ep_size * held
        block.run = functools.partial(run_on_ranks, group=ep_group)
        for number in list(block.experts):
            if int(number) not in range(first, first + held):
                del block.experts[number]
        for parameter in block.experts.parameters():
            place(parameter, average_over=edp_group, gradient_scale=1 / ep_size)
