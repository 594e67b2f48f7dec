"""train.py with a mistake, to see how a run hangs, goes wrong or is slow, see docs/debugging.md and docs/slow.md:

    torchrun --nproc_per_node 2 -m docs.programs.broken_run rank_raises --config docs/small.json --distributed.dp_size 2

The first argument is a mistake of MISTAKES below, all others are those of train.py.
To make waiting short, collectives time out after 20 seconds instead of gloo's 30 minutes.
"""

import contextlib
import datetime
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import train
from conformance.examples.ring import Shift
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.data.loader import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import Bucket, make_buckets
from picotron.model.placement import sum_partial_gradients
from picotron.pipeline_parallel.pipeline_parallel import train_step
from workbench.pipelines.executor import start_message
from workbench.pipelines.recorder import Recorder, record_action
from workbench.run.launch import exit_on_error

TIMEOUT = datetime.timedelta(seconds=20)


def in_step_3(action: Callable[[Any], None], rank: int = 1) -> Callable[..., Tensor]:
    """Return a `train_step` in which one rank calls `action(model)` at the beginning of step 3."""
    steps = itertools.count(1)

    def step(model: Any, *arguments: Any, **options: Any) -> Tensor:
        if next(steps) == 3 and dist.get_rank() == rank:
            action(model)
        return train_step(model, *arguments, **options)

    return step


def fail(model: Any) -> None:
    raise RuntimeError("cannot read the next batch")


def sleep(model: Any) -> None:
    time.sleep(3600)


def count_tokens(model: Any) -> None:
    dist.all_reduce(torch.zeros(1))


def damage(model: Any) -> None:
    next(model.parameters()).data[0, 0] = torch.nan


def reversed_buckets(parameters: Any, megabytes: float) -> list[Bucket]:
    buckets = make_buckets(parameters, 1.0)
    return buckets[::-1] if dist.get_rank() == 1 else buckets


def launch_sum(bucket: Bucket) -> None:
    bucket.work = all_reduce(bucket.buffer, bucket.group, async_op=True)


def late_next(loader: MicroBatchDataLoader) -> dict[str, Any]:
    time.sleep(0.03)
    return next_batch(loader)


def late_sum(model: Any) -> None:
    time.sleep(0.25)
    sum_partial_gradients(model)


@contextlib.contextmanager
def action_of_half_a_processor(name: str, recorder: Recorder | None = None) -> Iterator[None]:
    with record_action(name, recorder):
        start = time.perf_counter()
        yield
        if pgm.process_group_manager.pp_rank == 1:
            time.sleep(time.perf_counter() - start)


def own_groups(rows: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    groups = [dist.new_group(ids, backend=backend) for ids in rows if dist.get_rank() in ids]
    return groups[0]


def lossy_start_message() -> Callable[..., list[dist.Work]]:
    """Return a `start_message` that does not send the third message of rank 0."""
    sends = itertools.count(1)

    def start(operation: str, *arguments: Any) -> list[dist.Work]:
        if operation == "send" and dist.get_rank() == 0 and next(sends) == 3:
            return []
        return start_message(operation, *arguments)

    return start


class SkippingRing:
    """Ring attention through autograd with consecutive tokens, in which no rank uses the keys of later ranks."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor, blocks_of: object) -> Tensor:
        kv, seen = torch.stack((k, v)), list[Tensor]()
        for step in range(ranks := dist.get_world_size()):
            if step <= dist.get_rank():
                seen.insert(0, kv)
            kv = Shift.apply(kv) if step < ranks - 1 else kv
        k, v = torch.cat(seen, dim=-2)
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


STEP = "train.train_step"
next_batch = MicroBatchDataLoader.__next__


class Broken(NamedTuple):
    description: str
    target: str  # dotted name of a function
    replacement: Any


MISTAKES = {
    "rank_raises": Broken("In step 3, rank 1 raises an exception.", STEP, in_step_3(fail)),
    "rank_stuck": Broken("In step 3, rank 1 sleeps for an hour.", STEP, in_step_3(sleep)),
    "collective_on_one_rank": Broken(
        "In step 3, rank 0 alone calls all_reduce.", STEP, in_step_3(count_tokens, rank=0)
    ),
    "another_order": Broken(
        "Rank 1 reduces its buckets in the reverse order.",
        "picotron.data_parallel.data_parallel.make_buckets",
        reversed_buckets,
    ),
    "own_groups": Broken(
        "Each rank creates only the groups that it belongs to.",
        "picotron.process_group_manager.new_groups",
        own_groups,
    ),
    "message_not_sent": Broken(
        "Rank 0 does not send the hidden states of micro-batch 2 to the next stage.",
        "workbench.pipelines.executor.start_message",
        lossy_start_message(),
    ),
    "ring_skips": Broken(
        "Ring attention through autograd leaves out the keys of later ranks (with cp_sharding contiguous).",
        "picotron.context_parallel.context_parallel.RingAttention",
        SkippingRing,
    ),
    "gradients_not_divided": Broken(
        "The gradients are summed over the ranks, but not divided by their number.",
        "picotron.data_parallel.data_parallel.Bucket.launch",
        launch_sum,
    ),
    "late_data": Broken(
        "Each micro-batch arrives 30 ms late.", "picotron.data.loader.MicroBatchDataLoader.__next__", late_next
    ),
    "late_sum": Broken(
        "The sum of the tied embedding's gradients arrives 250 ms late.",
        "picotron.data_parallel.data_parallel.sum_partial_gradients",
        late_sum,
    ),
    "slow_rank": Broken(
        "pp rank 1 takes twice as long (with logging.trace_steps).",
        "workbench.pipelines.executor.record_action",
        action_of_half_a_processor,
    ),
    "nan_on_one_rank": Broken("In step 3, a weight of rank 1 becomes NaN.", STEP, in_step_3(damage)),
}


def main() -> None:
    if sys.argv[1:] == ["--help"]:
        print(__doc__, *(f"{name}: {mistake.description}" for name, mistake in MISTAKES.items()), sep="\n")
        return train.main()
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in MISTAKES:
        sys.exit(f"error: there is no mistake {name!r}; choose one of {', '.join(MISTAKES)}")
    mistake = MISTAKES[name]
    with (
        mock.patch(mistake.target, mistake.replacement),
        mock.patch("torch.distributed.distributed_c10d.default_pg_timeout", TIMEOUT),
    ):
        exit_on_error(train.main)


if __name__ == "__main__":
    main()
