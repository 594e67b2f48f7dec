"""Pipelines for the executor: several stages of a Llama on a rank, or any modules, such as the two halves of an
encoder-decoder.

    stages = {0: Encoder(), 1: Decoder()}                            # of all ranks, or of this one
    pipeline = Pipeline(stages, receives, build("1f1b", 2, 8))
    model = DataParallelBucket(pipeline)
    loss = Executor(pipeline.schedule)(model, BatchList(batches), device)   # or see `whole_batch`

A stage is called with the tensors of the message from the stage before it and with the arguments of the micro-batch. It
returns the message to the next stage, a tensor or a tuple of tensors; the last stage returns the loss. A tensor that a
later stage needs, such as the output of an encoder, passes through the stages between them.

Backward needs only the graph of an output, from its edge (`torch.autograd.graph.GradientEdge`) on. So a stage keeps the
edges of its outputs, and the memory of the outputs is free once they are sent. (Megatron-LM's
`deallocate_pipeline_outputs` frees as much.)
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.console import UserError
from picotron.data_parallel.guards import check_equal
from picotron.model.llama import AttentionFn, Llama
from picotron.model.placement import place, placement
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.pipeline_parallel.stages import Stage
from picotron.process_group_manager import new_groups
from workbench.pipelines.plan import SchedulePlan
from workbench.pipelines.split_backward import gradient_edges, split_backward
from workbench.schedules.actions import Schedule

Message = Tensor | tuple[Tensor, ...]
"""what a stage sends to the next one"""
Graph = list[GradientEdge | None]
"""the outputs of a stage, for backward, see `graph_of`"""
Receives = Callable[[int, dict[str, Any]], Message]
"""`receives(stage, batch)` returns tensors on the meta device like those that a stage receives for a micro-batch"""


def tensors(message: Message | None) -> tuple[Tensor, ...]:
    """Return the tensors of a message: none at the ends of a pipeline."""
    if message is None:
        return ()
    if not isinstance(message, Tensor | tuple | list):
        raise UserError(f"a stage returned a {type(message).__name__}; return a tensor, or a tuple of tensors")
    return (message,) if isinstance(message, Tensor) else tuple(message)


def with_gradients(message: Message | None) -> tuple[Tensor, ...]:
    """Return the tensors of a message whose gradients the stage that receives it sends back: all that can have one."""
    return tuple(x for x in tensors(message) if x.is_floating_point() or x.is_complex())


def graph_of(outputs: Message) -> Graph:
    """Return what backward needs of a stage's outputs: their edges in the graph; None for those without a gradient."""
    return gradient_edges(tensors(outputs))


class PipelineStages(nn.Module):
    """This rank's stages of a pipeline: what `Pipeline`, of any modules, and `LlamaStages` share.

    Attributes:
        stages: this rank's stages, by number.
    """

    stages: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> "PipelineStages":
        """Copy the modules, with the placements of their parameters, which torch's copies lack, and the same groups."""
        memo |= {id(group): group for group in dist.distributed_c10d._world.pg_map}
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))  # without what `compile` adds
        for parameter in self.parameters():
            if (own := memo.get(id(parameter), parameter)) is not parameter:  # which a program's `memo` can share
                place(own, **vars(placement(parameter)) | {"owned": None})
        for module in self.modules():  # a function that wraps a forward, as of torch.compile, has the old weights
            other = memo.get(id(module), module)
            if getattr(inspect.unwrap(other.forward), "__self__", None) is module is not other:
                del other.forward
        return copied

    def parameters_of(self, number: int) -> Iterable[nn.Parameter]:
        """Return the parameters that a stage of this rank uses."""
        raise NotImplementedError

    def receives(self, stage: int, batch: dict[str, Any]) -> Message:
        """Return tensors on the meta device like those that a stage receives, see `Receives`."""
        raise NotImplementedError

    def place_parameters(self, splits_backward: bool) -> None:
        """Say in the placement of each parameter which stages of this rank use it.

        The gradient of one that several stages share, such as a tied matrix, is complete after the backward of the
        first of them, which runs last. With a split backward, the W of any of them may be the last one: it belongs to
        none, and `finish_grad_sync` reduces it.
        """
        stages_of: dict[nn.Parameter, list[int]] = defaultdict(list)
        for number in map(int, self.stages):
            for parameter in dict.fromkeys(self.parameters_of(number)):
                stages_of[parameter].append(number)
        for parameter, numbers in stages_of.items():
            is_late = splits_backward and len(numbers) > 1
            place(parameter, stage=-1 if is_late else min(numbers), uses=len(numbers))


def backward(inputs: Sequence[Tensor], outputs: Graph, output_grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Add one micro-batch's gradients to those of the parameters, and return those of the stage's inputs.

    Args:
        inputs: the tensors of the message from the previous stage; none on the first stage.
        outputs: edges of the result of `forward`, see `graph_of`.
        output_grads: their gradients, from the next stage; (None,) on the last stage, whose output is the loss.
    """
    pairs = [(edge, dy) for edge, dy in zip(outputs, output_grads, strict=True) if edge is not None]
    if pairs:  # not so on a first stage whose weights are all frozen
        torch.autograd.backward([edge for edge, _ in pairs], [dy for _, dy in pairs])
    return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad)


def sequence_shards(model: nn.Module) -> int:
    """Return the number of tp ranks over which sequence parallelism shards the hidden states between layers, or 1."""
    is_sharded = any(getattr(module, "sequence_parallel", False) for module in model.modules())
    return pgm.process_group_manager.tp_world_size if is_sharded else 1


class LlamaStages(PipelineStages, PipelineParallel):
    """This rank's stages of a Llama.

    Args:
        model: a Llama on the meta device, from which the modules of other ranks are removed.
        plan: the stages of the pipeline, their ranks and the schedule.
        rank: this process's pp rank.

    Attributes:
        stages: contents of the stages, by number.
        kept_activations: (stage, micro-batch) of the forwards that do not recompute their activations in backward.
    """

    def __init__(self, model: Llama, plan: SchedulePlan, rank: int) -> None:
        stages = plan.stages_of(rank)
        layers = [i for stage in stages.values() for i in stage.layers]
        ends = (any(stage.has_embedding for stage in stages.values()), any(stage.has_head for stage in stages.values()))
        super().__init__(model, Stage(layers, *ends), plan.last_rank)
        self.plan, self.stages, self.kept_activations = plan, stages, plan.kept_activations(rank)
        self.splits_backward = plan.splits_backward
        self.dtype, self.shards = next(model.parameters()).dtype, sequence_shards(model)
        self.place_parameters(splits_backward=False)
        if self.splits_backward:
            split_backward(model)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_fn: AttentionFn | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        **loss: Any,
    ) -> Tensor:
        """Run a stage, by default this rank's first one, see `Llama.forward` and `Llama.run_layers`."""
        number = min(self.stages) if stage is None else stage
        contents, llama = self.stages[number], self.module
        x = llama.embed(input_ids) if contents.has_embedding else hidden_states
        assert x is not None
        layers = [llama.model.layers[str(i)] for i in contents.layers]
        recomputes = llama.checkpoint_activations and (number, micro_batch) not in self.kept_activations
        attend = attention_fn or llama.attention_fn
        if cu_seqlens is not None:
            from workbench.variants.packed import within_documents

            attend = within_documents(attend, cu_seqlens, x.device)
        y = llama.run_layers(x, position_ids, layers, attend, recomputes)
        return llama.logits_or_loss(y, **loss) if contents.has_head else y

    def receives(self, stage: int, batch: dict[str, Any]) -> Tensor:
        """Return a tensor on the meta device like the hidden states of a micro-batch: (B, T/cp, D), or (B, T/cp/tp, D)
        with sequence parallelism.
        """
        B, T = batch["position_ids"].shape
        shape = B, T // self.shards, self.module.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def parameters_of(self, number: int) -> list[nn.Parameter]:
        stage, decoder = self.stages[number], self.module.model
        modules: list[nn.Module] = [decoder.embed_tokens] if stage.has_embedding else []
        modules += [decoder.layers[str(i)] for i in stage.layers]
        modules += [decoder.norm, self.module.lm_head] if stage.has_head else []
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


class Pipeline(PipelineStages):
    """The stages of this rank as any modules.

    Args:
        stages: modules by number, of which this rank needs its own. They are called as
            `stage(*message, *batch["args"], **batch)`, where `batch` is the micro-batch without "args".
        receives: see `Receives`. It is not called for the first stage.
        schedule: the schedule of a training step. If it splits backward, the weight gradients of all `nn.Linear` whose
            input has a gradient are computed by W, all others by I.
        tied: sets of (stage, name of a parameter in it) that are the same matrix, such as an embedding and a head. The
            ranks that hold them start with equal values, which the caller provides. It is frozen if any of them is.

    Raises:
        UserError: a stage of this rank is missing, or ranks start with different values of a tied matrix.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        receives: Receives,
        schedule: Schedule,
        tied: Sequence[Sequence[tuple[int, str]]] = (),
    ) -> None:
        super().__init__()
        rank = pgm.process_group_manager.pp_rank
        if missing := [number for number in schedule.stages_of(rank) if number not in stages]:
            raise UserError(f"pp rank {rank} runs stage {missing[0]}, but `stages` lacks it; add its module")
        self.stages = nn.ModuleDict({str(number): stages[number] for number in schedule.stages_of(rank)})
        self.schedule, self.message_of = schedule, receives
        self.groups: dict[tuple[int, ...], Any] = {}  # of the ranks that share parameters
        for each in tied:
            self._tie(each)
        self.place_parameters(schedule.splits_backward)
        if schedule.splits_backward:
            split_backward(self)

    def _tie(self, places: Sequence[tuple[int, str]]) -> None:
        """Let the stages of this rank share a parameter, whose gradient is summed over all ranks that hold it."""
        grid, mine, is_frozen = pgm.process_group_manager, None, False
        ranks = tuple(dict.fromkeys(self.schedule.rank_of(stage) for stage, _ in places))
        for stage, name in places:
            if str(stage) in self.stages:
                path, _, leaf = name.rpartition(".")
                module = self.stages[str(stage)].get_submodule(path)
                is_frozen |= not getattr(module, leaf).requires_grad
                mine = getattr(module, leaf) if mine is None else mine
                setattr(module, leaf, mine)
                place(mine, is_tied=True, shared_name=str(places), is_replica=grid.pp_rank != ranks[0])
        if len(ranks) > 1 and ranks not in self.groups:
            rows = grid.grid.movedim(1, -1)[..., ranks].reshape(-1, len(ranks)).tolist()
            self.groups[ranks] = new_groups(rows)
        group = self.groups.get(ranks)
        if mine is not None:
            frozen = torch.tensor(float(is_frozen), device=mine.device)
            if group is not None:
                check_equal({places[0][1]: mine}, group)
                all_reduce(frozen, group, dist.ReduceOp.MAX)
            mine.requires_grad_(mine.requires_grad and not frozen.item())
            if group is not None:
                assert placement(mine).sum_over is None, "a tied matrix cannot have other partial gradients"
                place(mine, sum_over=group)

    def forward(
        self,
        hidden_states: Message | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        args: Sequence[Any] = (),
        inputs: Sequence[Any] = (),
        loss: Callable[[Message], Tensor] | None = None,
        **batch: Any,
    ) -> Message:
        """Run a stage, by default this rank's first one, on the message from the stage before it.

        Args:
            args: arguments of each stage, after the message.
            inputs: arguments of the first stage, instead of a message.
            loss: function of the last stage's output, whose result the stage then returns.
        """
        number = min(map(int, self.stages)) if stage is None else stage
        message = tensors(hidden_states) if number > 0 else inputs
        outputs: Message = self.stages[str(number)](*message, *args, **batch)
        return outputs if loss is None or number < self.schedule.num_stages - 1 else loss(outputs)

    def parameters_of(self, number: int) -> Iterable[nn.Parameter]:
        return self.stages[str(number)].parameters()

    def receives(self, stage: int, batch: dict[str, Any]) -> Message:
        return self.message_of(stage, batch)
