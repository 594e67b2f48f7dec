"""Mixtures of experts: a router chooses some MLPs for each token (Shazeer et al. 2017, arXiv:1701.06538), and no token
is dropped (Gale et al. 2022, arXiv:2211.15841).

    tokens (N, D)      ->  router            ->  experts and weights of each token (N, k)
    rows (N k, D)      sorted by expert      ->  each expert computes its rows, one block after the other
    outputs (N k, D)   in the tokens' order  ->  sum of each token's k outputs times their weights (N, D)
                                                 and the output of a shared expert, if there is one, for all tokens

In shapes, N is the number of tokens, E of experts, k of the experts of a token, R of rows, and F the intermediate size
of an expert. Parameters have the names of the hub's files, such as `mlp.experts.3.gate_proj.weight`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype, all_reduce
from picotron.config import Distributed
from picotron.model.families import differences
from picotron.model.llama import ACTIVATIONS, GatedActivation, Linear, Llama
from picotron.model.placement import Shard, owned_weight, place, placement
from picotron.tensor_parallel.tensor_parallel import column_parallel
from picotron.tensor_parallel.tp_communications import enter, leave
from workbench.run.checkpoint.expert_names import BIAS, ExpertNames, expert_names


class Permute(torch.autograd.Function):
    """forward: row i of the result is row order[i] // copies of x. backward: each row's gradient is the sum of those of
    its copies, always in the same order, unlike that of `index_select` on a GPU. `inverse` is the inverse of `order`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        dx = dy.index_select(0, inverse)
        return dx if ctx.copies == 1 else dx.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class Expert(nn.Module):
    """A gated MLP, whose matrices have the names of the family: (R, D) -> (R, D)."""

    names: ExpertNames

    def __init__(self, config: PreTrainedConfig, size: int) -> None:
        super().__init__()
        self.names = expert_names(config.model_type)
        self.act_fn = GatedActivation(ACTIVATIONS[config.hidden_act])
        setattr(self, self.names.gate, Linear(config.hidden_size, size, bias=False))
        setattr(self, self.names.up, Linear(config.hidden_size, size, bias=False))
        setattr(self, self.names.down, Linear(size, config.hidden_size, bias=False))

    @property
    def down(self) -> nn.Module:
        linear: nn.Module = getattr(self, self.names.down)
        return linear

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = getattr(self, self.names.gate), getattr(self, self.names.up)
        hidden: Tensor = self.act_fn(gate(rows), up(rows))  # (R, F)
        output: Tensor = self.down(hidden)
        return output


def run_experts(experts: nn.ModuleDict, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute the experts: (R, D), sorted by expert -> (R, D).

    Args:
        counts: number of rows of each expert. One without rows runs nevertheless: its gradient is 0, for which data
            parallelism waits.
    """
    parts = rows.split(counts.tolist())
    return torch.cat([expert(part) for expert, part in zip(experts.values(), parts, strict=True)])


class Experts(nn.Module):
    """The block of a router and experts in the place of an MLP: (B, T, D) -> (B, T, D).

    Attributes:
        load: number of tokens of each expert, of this rank's tokens in forwards with gradients, see `balance`.
        enter, leave: begin and end of the block; tensor parallelism has others.
        run: `run_experts`; expert parallelism sends the rows to other ranks, and their outputs back.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        facts = differences(config).experts
        assert facts is not None
        self.number, self.chosen, self.normalised, self.scale = (
            facts.number,
            facts.chosen,
            facts.normalised,
            facts.scale,
        )
        self.rounds = config.model_type not in ("mixtral", "dots1")  # whose weights stay in float32, as in transformers
        self.gate = Linear(config.hidden_size, facts.number, bias=False)
        # By number, so that an expert keeps its name on a rank that removes others.
        self.experts = nn.ModuleDict({str(i): Expert(config, facts.size) for i in range(facts.number)})
        self.shared_experts = Expert(config, facts.shared) if facts.shared else None
        self.load: Tensor | int = 0
        self.enter: Callable[[Tensor], Tensor] = unchanged
        self.leave: Callable[[Tensor], Tensor] = unchanged
        self.run: Callable[[nn.ModuleDict, Tensor, Tensor], Tensor] = run_experts

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens (N, D). Returns their weights and their numbers, (N, k) each. Scores are in
        float32 or wider, as in transformers.
        """
        wide = accumulation_dtype(tokens)
        if self.scale is None:
            logits = self.gate(tokens)  # (N, E)
            weights, chosen = logits.softmax(-1, dtype=wide).topk(self.chosen)
        else:
            scores = F.linear(tokens.to(wide), self.gate.weight.to(wide)).sigmoid()  # (N, E)
            chosen = (scores + self.get_parameter(BIAS)).topk(self.chosen).indices
            weights = scores.gather(1, chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * (self.scale or 1.0)
        return weights.to(tokens.dtype) if self.rounds else weights, chosen

    @torch.compiler.disable  # the numbers of rows differ in each step
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.enter(x).flatten(0, 1)  # (N, D)
        weights, chosen = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)  # of the N k pairs of a token and an expert
        inverse = order.argsort()
        rows = Permute.apply(tokens, order, inverse, self.chosen)
        counts = chosen.flatten().bincount(minlength=self.number)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # not again, in backward
            self.load = self.load + counts
        outputs = self.run(self.experts, rows, counts)
        outputs = Permute.apply(outputs, inverse, order).unflatten(0, (-1, self.chosen))  # (N, k, D)
        y = (outputs * weights[..., None]).sum(1).to(x.dtype)
        if self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        return self.leave(y.unflatten(0, (len(x), -1)))


def unchanged(x: Tensor) -> Tensor:
    return x


def put_experts(model: Llama, layout: Distributed, bias_rate: float = 0.0) -> Llama:
    """Put this rank's experts in the place of a Llama's MLPs. The model is on the meta device; `apply_tensor_parallel`
    may have split it.

    Args:
        bias_rate: see `balance`.
    """
    config, names, facts = model.config, expert_names(model.config.model_type), differences(model.config).experts
    assert facts is not None
    layers: Any = model.model.layers
    for number, layer in layers.items():
        if int(number) in facts.dense:
            continue
        experts = Experts(config).to(model.model.norm.weight.dtype)
        if facts.scale is not None:
            bias = torch.zeros(facts.number, dtype=accumulation_dtype(experts.gate.weight))
            experts.gate.register_parameter(BIAS.rpartition(".")[2], nn.Parameter(bias, requires_grad=False))
        if layout.tp_size > 1:
            split_experts(experts, layout.sequence_parallel)
        del layer.mlp
        layer.add_module(names.block, experts)
        vars(layer)["mlp"] = experts  # the name by which a layer calls it, also if the hub has another one
    vars(model)["after_step"] = functools.partial(balance, model, bias_rate)
    if layout.ep_size > 1:
        from workbench.variants.expert_parallel import keep_experts

        keep_experts(model, layout.ep_size)
    return model


@torch.no_grad()
def balance(model: Llama, rate: float) -> dict[str, float]:
    """Let the bias of each expert rise by `rate` if fewer tokens chose it since the last call than the mean of its
    layer, and fall if more did (Wang et al. 2024, arXiv:2408.15664, algorithm 1). Every rank must call this.

    Returns:
        The metric `expert_load`: the largest number of tokens of an expert, over the mean of its layer. Neither this
        nor the biases depend on the layout.
    """
    facts, layers = differences(model.config).experts, model.model.layers
    assert facts is not None
    size, device = (model.config.num_hidden_layers, facts.number), next(model.parameters()).device
    counts = torch.zeros(size, dtype=torch.float64, device=device)
    for number, layer in layers.items():
        if isinstance(layer.mlp, Experts):
            counts[int(number)], layer.mlp.load = layer.mlp.load, 0
    all_reduce(counts, None)
    means = counts.mean(1, keepdim=True)
    steps = rate * (means - counts).sign()
    for number, layer in layers.items():
        if rate and isinstance(layer.mlp, Experts) and layer.mlp.gate.weight.requires_grad:  # else the router is frozen
            bias = layer.mlp.get_parameter(BIAS)
            owned = placement(bias).owned  # with ZeRO-3
            own = slice(None) if owned is None else slice(*owned.bounds(owned.rank))
            owned_weight(bias).add_(steps[int(number), own])
    return {"expert_load": (counts / means).nan_to_num().max().item()}  # dense layers have no tokens


def split_experts(block: Experts, sequence_parallel: bool) -> None:
    """Split the matrices of experts over the tp ranks, as those of an MLP. The partial sums of a token's experts are
    summed over its experts first, and then over the ranks.
    """
    grid = pgm.process_group_manager
    block.enter = functools.partial(enter, group=grid.tp_group, sequence_parallel=sequence_parallel)
    block.leave = functools.partial(leave, group=grid.tp_group, sequence_parallel=sequence_parallel)
    # Each rank weights other partial sums, so it has a part of the gradient of the weights.
    place(block.gate.weight, sum_over=grid.tp_group)
    experts: Any = [*block.experts.values(), *([block.shared_experts] if block.shared_experts else [])]
    for expert in experts:
        for name in expert.names[1:]:
            linear: Any = expert.get_submodule(name)
            is_down = name == expert.names.down
            full = linear.in_features if is_down else linear.out_features
            size = full // grid.tp_world_size
            shard = Shard(0, full, grid.tp_rank * size, (grid.tp_rank + 1) * size, size)
            setattr(expert, name, row_parallel(linear, shard) if is_down else column_parallel(linear, shard))


def row_parallel(linear: Linear, shard: Shard) -> Linear:
    """Return the part of a linear layer on the meta device for some of the inputs, whose outputs are partial sums."""
    weight = linear.weight
    part = Linear(shard.size, linear.out_features, False, weight.device, weight.dtype)
    place(part.weight, shard=dataclasses.replace(shard, dim=1))
    return part
