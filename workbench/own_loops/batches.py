"""Training steps and forward passes on batches of your own, with a loss of your own, in every layout and schedule.

    step = make_train_step(config, plan, device, dtype)
    batches = split_batch({"input_ids": ids, "target_ids": targets, "advantages": advantages}, micro_batches=4)
    result = train_batch(step, model, batches, loss_fn)

Each micro-batch carries a function that the last stage calls instead of computing the cross entropy. So the training
loops do not change. Statistics and outputs stay on the last stage until the step is complete.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.console import UserError
from picotron.context_parallel.context_parallel import local_positions
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.cross_entropy import IGNORE_INDEX
from picotron.optimizer import scale_gradients
from picotron.pipeline_parallel.pipeline_parallel import Step
from picotron.tensor_parallel.tp_communications import pair, start_all_reduce
from workbench.own_loops.check_batches import Batch, check_batches, check_split
from workbench.pipelines.engine import BatchList
from workbench.run.all_ranks import run_on_all_ranks
from workbench.variants.experts import Experts

LossParts = tuple[Tensor, Tensor | float, dict[str, Tensor | float]]  # loss, weight and statistics of a micro-batch
Loss = Tensor | tuple[Tensor, Tensor | float, dict[str, Tensor]]
MODEL_INPUTS = ("input_ids", "position_ids", "cu_seqlens")
# The loss of each rank depends on the sum, and the loss of the step is the sum of the ranks' losses.
sum_for_own_losses = pair(start_all_reduce, start_all_reduce)


class BatchResult(NamedTuple):
    """The result of `train_batch`, the same on every rank: the loss of the global batch, and the named statistics."""

    loss: float
    statistics: dict[str, float]


def micro_batches_or_default(micro_batches: int | None) -> int:
    """Return a number of micro-batches. By default, a pipeline has two for each rank, so that the bubble of 1F1B takes
    less than a third of the time, and without a pipeline there is one.

    Raises:
        UserError: the number is less than 1.
    """
    pp: int = pgm.process_group_manager.pp_world_size
    if micro_batches is None:
        return 2 * pp if pp > 1 else 1
    if micro_batches < 1:
        raise UserError(f"micro_batches={micro_batches} should be at least 1")
    return micro_batches


def split_batch(batch: Batch, micro_batches: int | None = None, cp_sharding: str = "zigzag") -> list[Batch]:
    """Cut a global batch, which every rank has, into this rank's micro-batches.

    Args:
        batch: tensors with a first dimension of G sequences, of which `input_ids` is (G, T). Those that begin with (G,
            T) are also cut along the sequence, over the cp ranks. `cu_seqlens` has the boundaries of documents among
            all G T tokens, see `PackedDocuments`. By default, `position_ids` are 0, 1, 2, ... Everything else, such
            as a number, is passed on as it is.
        micro_batches: number of micro-batches on each dp rank, see `micro_batches_or_default`. Micro-batch i of dp
            rank r has the sequences that `MicroBatchDataLoader` would give it.
        cp_sharding: see `local_positions`.
    """
    grid = pgm.process_group_manager
    micro_batches = micro_batches_or_default(micro_batches)
    rows = check_split(batch, micro_batches, cp_sharding)
    sequences, length = batch["input_ids"].shape
    positions = local_positions(length, grid.cp_world_size, grid.cp_rank, cp_sharding)
    positions = positions.to(batch["input_ids"].device)
    position_ids = torch.arange(length, device=positions.device).expand(sequences, -1)
    defaults: Batch = {"position_ids": position_ids, "cp_sharding": cp_sharding}
    batch = defaults | batch

    def cut(value: Any, first: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        value = value[first : first + rows]
        return value[:, positions] if value.shape[1:2] == (length,) else value

    parts = []
    for i in range(micro_batches):
        first = (i * grid.dp_world_size + grid.dp_rank) * rows
        part = {name: cut(value, first) for name, value in batch.items() if name != "cu_seqlens"}
        if (boundaries := batch.get("cu_seqlens")) is not None:
            inside = (boundaries >= first * length) & (boundaries <= (first + rows) * length)
            part["cu_seqlens"] = boundaries[inside] - first * length
        parts.append(part)
    return parts


def normalise_weights(batches: Sequence[Batch], scope: str = "global") -> list[Batch]:
    """Scale the `target_weights` of this rank's micro-batches, so that the mean over micro-batches and ranks of the
    weighted sums of losses is their weighted mean.

    Args:
        scope: "global" for the weighted mean over the global batch, which depends neither on the layout nor on the
            micro-batch in which a token is, or "dp_rank" for the mean over dp ranks of the weighted mean of each.

    Raises:
        UserError: on every rank, if a sum of weights is not positive.
    """
    grid = pgm.process_group_manager
    if scope not in ("global", "dp_rank"):
        raise UserError(f"scope={scope!r} is unknown; use 'global' or 'dp_rank'")
    size = grid.cp_dp_world_size if scope == "global" else grid.cp_world_size
    mean = torch.stack([batch["target_weights"].sum(dtype=torch.float64) for batch in batches]).mean()
    all_reduce(mean, grid.cp_dp_group if scope == "global" else grid.cp_group, dist.ReduceOp.AVG)
    smallest = mean.where(mean != math.inf, -math.inf)
    all_reduce(smallest, grid.cp_dp_group, dist.ReduceOp.MIN)
    if not (total := smallest.item() * len(batches) * size) > 0:
        whole = "the global batch" if scope == "global" else "a data-parallel rank"
        raise UserError(
            f"the target_weights of {whole} sum to {abs(total) if total == -math.inf else total:g}, but their mean needs a "
            f"positive, finite sum; give targets positive, finite weights"
        )
    return [batch | {"target_weights": batch["target_weights"].double() / mean} for batch in batches]


def sum_over_sequence(x: Tensor) -> Tensor:
    """Sum over the tokens of each sequence, of which a cp rank holds some: (B, T/cp) -> (B,), equal on all cp ranks.

    A loss that is not a sum over tokens needs it, such as a sigmoid of a sequence's log-probability. All cp ranks call
    it, and each of them returns the loss of whole sequences.
    """
    return sum_for_own_losses(x.sum(-1), pgm.process_group_manager.cp_group)


def cross_entropy(head: Any, x: Tensor, batch: Batch) -> Tensor:
    """Compute the default loss of a micro-batch: the cross entropy of its `target_ids`.

    Raises:
        UserError: the micro-batch has no `target_ids`.
    """
    if "target_ids" not in batch:
        raise UserError(
            "a micro-batch has no target_ids, which the cross entropy needs: for each token, the id of the next"
        )
    return head.cross_entropy(x, batch["target_ids"], batch.get("target_weights"))


def _logits(head: Any, x: Tensor, batch: Batch) -> Tensor:
    return head(x)


def train_batch(
    step: Step,
    model: DataParallel,
    batches: Sequence[Batch],
    loss_fn: Callable[[Any, Tensor, Batch], Loss] = cross_entropy,
    losses: list[Tensor] | None = None,
    scope: str = "global",
) -> BatchResult:
    """Run forward and backward for this rank's micro-batches. Gradients end up in `main_grad`, as after `train_step`.

    Args:
        step: see `make_train_step`.
        batches: micro-batches, see `split_batch`, of any lengths. `target_weights` are normalised first, see
            `normalise_weights`. By default, all targets have the same weight, also if micro-batches differ.
        loss_fn: function of the head, its input x (B, T/cp, D) and the micro-batch, whose targets of weight 0 are
            IGNORE_INDEX. The head has `cross_entropy` and `local_logits`, and is itself a function of x
            that returns the logits (B, T/cp, V); with sequence parallelism, x is (B, T/cp/tp, D), and only the head
            gathers all tokens. The result is the loss of the micro-batch, a scalar, or (loss, weight, statistics): then
            loss and statistics are sums over the micro-batch, numbers or scalar tensors, and are divided by the sum of
            the weights of all micro-batches of all ranks. The names of the statistics must be the same in all of them.
        losses: list that gets the results of `loss_fn` without their gradients, in the order of `batches`, on ranks
            with the last stage; on the others it is emptied.
        scope: see `normalise_weights`.

    Raises:
        UserError: the batches do not fit the step or each other, a loss is not a scalar, all weights are 0, or
            gradients of an earlier step are there.
    """
    needs_weights = check_batches(model, batches, is_training=True)
    batches = [_without_uncounted_targets(batch) for batch in batches]
    if needs_weights:
        batches = [_with_weights(batch) for batch in batches]
    if "target_weights" in batches[0]:
        batches = normalise_weights(batches, scope)
    results: dict[int, LossParts] = {}  # by micro-batch

    def with_loss(i: int, batch: Batch) -> Batch:
        def loss(head: Any, x: Tensor) -> Tensor:
            returned = loss_fn(head, x, batch)
            value, weight, statistics = returned if isinstance(returned, tuple) else (returned, 1.0, {})
            if value.ndim > 0:
                raise UserError(
                    f"loss_fn returned a loss of shape {list(value.shape)}; return a scalar, such as loss.sum()"
                )
            if not value.requires_grad:
                raise UserError(
                    "loss_fn returned a loss without a gradient; unfreeze a parameter, or compute the loss from x without detach"
                )
            results[i] = value.detach(), _detached(weight), {name: _detached(each) for name, each in statistics.items()}
            return _with_all_gradients(value, [x, *head.parameters()])

        return _model_inputs(batch, loss)

    with whole_step(model):
        step(model, BatchList([with_loss(i, batch) for i, batch in enumerate(batches)]))
        model.finish_grad_sync()
        ordered = [results[i] for i in sorted(results)]
        if losses is not None:
            losses[:] = [loss for loss, _, _ in ordered]
        loss, weight, statistics = _sum_over_ranks(ordered)
        if not 0 < weight < math.inf:
            raise UserError(
                f"the weights that loss_fn returned sum to {weight:g}; their sum must be positive and finite"
            )
        # The step has divided by the number of terms, of micro-batches and ranks, instead of by the weight.
        terms = len(batches) * pgm.process_group_manager.cp_dp_world_size
        if weight != terms:
            scale_gradients(model, terms / weight)
    return BatchResult(loss / weight, {name: total / weight for name, total in statistics.items()})


@contextlib.contextmanager
def whole_step(model: DataParallel) -> Iterator[None]:
    """Context of a step. After an error, clear the gradients and the counts of experts: the program may go on."""
    try:
        yield
    except BaseException:
        model.zero_grad()
        for each in model.modules():
            if isinstance(each, Experts):
                each.load = 0
        raise


def _without_uncounted_targets(batch: Batch) -> Batch:
    """Replace targets of weight 0, such as those in prompts, by IGNORE_INDEX, so that a loss counts none of them."""
    if not {"target_ids", "target_weights"} <= batch.keys():
        return batch
    return batch | {"target_ids": batch["target_ids"].where(batch["target_weights"] != 0, IGNORE_INDEX)}


def _detached(number: Tensor | float) -> Tensor | float:
    return number.detach() if isinstance(number, Tensor) else number


def _with_all_gradients(loss: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Let backward compute a gradient of each input of a loss, 0 if the loss does not depend on it. With ZeRO-3,
    gathers and reductions follow the gradients, so all ranks need the same ones.
    """
    wanted = {get_gradient_edge(each).node: each for each in inputs if each.requires_grad}
    found, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None and node not in found:
            found.add(node)
            nodes += [] if node in wanted else [before for before, _ in node.next_functions]
    for each in (each for node, each in wanted.items() if node not in found):
        loss = loss + each[:0].sum()  # 0, also if the values are NaN
    return loss


def _with_weights(batch: Batch) -> Batch:
    """Give targets that are IGNORE_INDEX the weight 0, and all others their weight, or 1."""
    if "target_ids" not in batch:  # as on a rank without the last stage
        return batch
    counted = batch["target_ids"] != IGNORE_INDEX
    return batch | {"target_weights": counted.double() * batch.get("target_weights", 1)}


def _model_inputs(batch: Batch, loss_fn: Callable[[Any, Tensor], Tensor]) -> Batch:
    """Return the arguments of the model for a micro-batch."""
    inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
    return inputs | {"hidden_states": None, "loss_fn": loss_fn}


def _sum_over_ranks(results: Sequence[LossParts]) -> tuple[float, float, dict[str, float]]:
    """Sum losses, weights and statistics over micro-batches and ranks. Every rank gets the sums."""

    def own() -> list[tuple[float, float, dict[str, float]]]:
        if pgm.process_group_manager.tp_rank > 0:  # further tp ranks have equal results
            return []
        return [
            (float(loss), float(weight), {name: float(each) for name, each in statistics.items()})
            for loss, weight, statistics in results
        ]

    losses, weights, statistics = zip(*itertools.chain(*run_on_all_ranks(own)), strict=True)
    names = statistics[0].keys()
    if different := [each.keys() ^ names for each in statistics if each.keys() != names]:
        raise UserError(
            f"loss_fn returned the statistic {min(different[0])!r} for some micro-batches only; return it for all of them"
        )
    return sum(losses), sum(weights), {name: sum(each[name] for each in statistics) for name in names}


def forward_batch(
    evaluate: Step,
    model: DataParallel,
    batches: Sequence[Batch],
    post_hook: Callable[[Any, Tensor, Batch], Any] = _logits,
    merge: Callable[[list[Tensor]], Any] = torch.cat,
) -> Any:
    """Run forward only, and merge the outputs of the micro-batches.

    Args:
        evaluate: see `make_evaluation`.
        batches: micro-batches, see `split_batch`.
        post_hook: function of the head, its input x (B, T/cp, D) and the micro-batch, as `loss_fn` of `train_batch`.
            It returns a tensor or a dict of tensors; by default the logits (B, T/cp, V).
        merge: function of the list of these tensors, in the order of `batches`. By default, they are concatenated along
            their first dimension; `list` returns them as they are, if micro-batches differ in their lengths.

    Returns:
        On ranks with the last stage, the merged outputs, or a dict of them; on the others None.
    """
    check_batches(model, batches)
    batches = [_without_uncounted_targets(batch) for batch in batches]
    by_batch: dict[int, Any] = {}

    def with_hook(i: int, batch: Batch) -> Batch:
        def hook(head: Any, x: Tensor) -> Tensor:
            by_batch[i] = post_hook(head, x, batch)
            return x.new_zeros(())  # as the loss, which is not used

        return _model_inputs(batch, hook)

    with torch.no_grad():
        evaluate(model, BatchList([with_hook(i, batch) for i, batch in enumerate(batches)]))
    outputs = [by_batch[i] for i in sorted(by_batch)]
    if outputs and isinstance(outputs[0], dict):
        return {name: merge([output[name] for output in outputs]) for name in outputs[0]}
    return merge(outputs) if outputs else None
