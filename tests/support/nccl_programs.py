"""Programs for `nccl_order`: everything that a training step and an evaluation ask of NCCL, rank by rank.

As in `explain`, one process plays each rank of a layout, alone, in process groups that transfer nothing. These groups
record every call with its place in the order of all calls of the rank, and receive zeros. The model is real, but tiny,
and on the CPU; the values that it computes are meaningless.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from picotron.config import Config
from picotron.data.loader import MicroBatchDataLoader, TextRows
from picotron.data_parallel import guards
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model.placement import Index
from picotron.pipeline_parallel import pipeline_parallel
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from tests.support.training import CPU, dtype_of, pipeline_of, set_up_grid
from workbench.explain.explain import run_step
from workbench.explain.fake_group import OPERATIONS, call_site
from workbench.pipelines import recorder
from workbench.pipelines.executor import reverse_group
from workbench.run.metrics import global_mean
from workbench.schedules.nccl_calls import Compute, Operation, Part, Program, Wait
from workbench.variants import choose, zero1
from workbench.variants.zero1 import DataParallelZero1

SmallBuckets = functools.partial(DataParallelBucket, bucket_mb=0.02)  # several for each stage of a tiny model
SmallSlicedBuckets = functools.partial(DataParallelZero1, bucket_mb=0.02)


class Handle(dist.Work):
    """Handle of an operation, which records the wait for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.program = number, RecordingGroup.program

    def wait(self, timeout: Any = None) -> bool:
        self.program.append(Wait(self.number))
        return True


class RecordingGroup(dist.ProcessGroup):
    """A process group that appends its operations to `program`.

    It has no messages outside of batches, for which NCCL would create other communicators.
    """

    program: ClassVar[Program]  # of the rank that is played
    name: str  # identical on all ranks, because they create all groups in the same order

    def collective(self, operation: str, *arguments: Any) -> Handle:
        tensors = [each[0] if isinstance(each, list) and each else each for each in arguments]
        full = max((each for each in tensors if isinstance(each, Tensor)), key=Tensor.numel)
        reduces = operation in ("all-reduce", "reduce-scatter")
        name = f"{operation} ({arguments[-1].reduceOp.op.name})" if reduces else operation
        if operation != "all-reduce":
            arguments[0].zero_()  # allocated without values, which would differ from run to run
        return self.record(Part(name, describe(full)))

    def record(self, *parts: Part) -> Handle:
        number, ranks = len(self.program), tuple(dist.get_process_group_ranks(self))
        self.program.append(Operation(number, self.name, ranks, parts, call_site(sys._getframe(1))))
        return Handle(number)

    def getBackendName(self) -> str:
        return "recording"


for method, operation in OPERATIONS.items():
    if operation not in ("send", "receive"):
        setattr(RecordingGroup, method, functools.partialmethod(RecordingGroup.collective, operation))


def new_group(options: Any, _: Any) -> RecordingGroup:
    group = RecordingGroup(options.group_rank, options.group_size)
    group.name = options.group_id
    return group


dist.Backend.register_backend("recording", new_group, extended_api=True, devices=["cpu"])


def describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def record_batch(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Record the messages as one operation: on NCCL, `batch_isend_irecv` starts them together."""
    names = {dist.isend: "send", dist.irecv: "receive"}
    parts = [Part(names[each.op], describe(each.tensor), each.peer) for each in messages]
    return [messages[0].group.record(*parts)]


def record_computation(_: str, rank: int, action: str) -> None:
    """Record a forward or backward that `record_action` logs. (It also logs messages and reductions.)"""
    if not re.search("SEND|R", action):
        RecordingGroup.program.append(Compute(action))


def recorded(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return a function of the loops, AFAB and 1F1B, that records its calls as forwards or backwards."""

    def call(*arguments: Any) -> Any:
        RecordingGroup.program.append(Compute(kind))
        return function(*arguments)

    return call


class WithoutCuda(TorchFunctionMode):
    """Creates tensors for the GPU on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return function(*args, **kwargs | ({"device": CPU} if kwargs.get("device") == "cuda" else {}))


@contextlib.contextmanager
def recorded_rank(rank: int, config: Config) -> Iterator[Program]:
    """Play one rank of a layout, and record its program."""
    world_size = config.distributed.world_size
    RecordingGroup.program = program = []
    dist.init_process_group("recording", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        # On NCCL, the grid communicates once in the groups that have messages.
        with mock.patch.object(dist, "get_backend", return_value="nccl"), WithoutCuda():
            set_up_grid(config)
            reverse_group()
        with (
            mock.patch.object(dist, "batch_isend_irecv", record_batch),
            mock.patch.object(guards, "check_equal"),  # reads values, before the first step
            mock.patch.object(choose, "DataParallelBucket", SmallBuckets),
            mock.patch.object(zero1, "DataParallelZero1", SmallSlicedBuckets),
            mock.patch.object(recorder.logger, "debug", record_computation),
            mock.patch.object(pipeline_parallel, "forward_step", recorded(pipeline_parallel.forward_step, "F")),
            mock.patch.object(PipelineParallel, "backward", recorded(PipelineParallel.backward, "B")),
        ):
            yield program
    finally:
        dist.destroy_process_group()


def zeros(name: str, shape: torch.Size, index: Index) -> Tensor:
    """Return weights, which have no values here."""
    return torch.zeros(shape)[index]


def record_rank(rank: int, config: Config, model_config: LlamaConfig) -> Program:
    """Record a training step, with clipping, optimizer and metrics, and the evaluation after it."""
    with recorded_rank(rank, config) as program:
        pipeline, train_step, evaluate = pipeline_of(config, model_config)
        model = choose.build_model(config, model_config, pipeline, CPU, dtype_of(config), zeros)
        length = config.training.seq_length
        loader = MicroBatchDataLoader(TextRows(np.zeros(length + 1, np.uint16), length), config, CPU)
        run_step(model, loader, config, train_step)
        global_mean(evaluate(model, loader))
    return program


def record(config: Config, model_config: LlamaConfig) -> list[Program]:
    """Record the programs of all ranks."""
    return [record_rank(rank, config, model_config) for rank in range(config.distributed.world_size)]
