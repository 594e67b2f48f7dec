"""Two processes that divide the optimizer, or weights and gradients, too: picotron compared with PyTorch.

python -m benchmarks.sharding

ZeRO-1 is compared with DistributedDataParallel and its ZeroRedundancyOptimizer, and ZeRO-3 with `fully_shard` (FSDP2),
both with transformers' model. As in picotron's ZeRO-3, FSDP2 reduces the gradients of each micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import (
    MICRO_BATCH,
    MICRO_BATCHES,
    ON_GPU,
    SEQ_LENGTH,
    arguments,
    device_of,
    loader_of,
    picotron_step,
    require_gpus,
    run_config,
    torch_adamw,
    torch_step,
    transformers_model,
)

DP = 2


def zero_redundancy_step(rank: int) -> Callable[[], Any]:
    """Return a step with DistributedDataParallel and ZeroRedundancyOptimizer."""
    device = device_of(rank)
    model = DistributedDataParallel(transformers_model(device, DP), gradient_as_bucket_view=True)
    optimizer = torch_adamw(model.parameters(), ZeroRedundancyOptimizer)
    return torch_step(model, optimizer, loader_of(run_config({"dp_size": DP}), device))


def fully_shard_step(rank: int) -> Callable[[], Any]:
    """Return a step with FSDP2, one unit per layer; on a GPU, it computes in bfloat16 and reduces in float32."""
    device = device_of(rank)
    model = transformers_model(device, DP)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if ON_GPU else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch_step(model, torch_adamw(model.parameters()), loader_of(run_config({"dp_size": DP}), device))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    require_gpus(DP)
    for theirs, prepare, engine in (
        ("DistributedDataParallel, ZeroRedundancyOptimizer", zero_redundancy_step, "zero1"),
        ("fully_shard", fully_shard_step, "zero3"),
    ):
        baseline = f"transformers, {theirs}"
        layouts = {f"picotron, {each}": {"dp_size": DP, "dp_engine": each} for each in ("bucket", engine)}
        ours = [Variant(name, picotron_step, (layout,), DP) for name, layout in layouts.items()]
        results = measure([Variant(baseline, prepare, (), DP), *ours], options.turns, options.steps)
        print_table(results, SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES * DP, baseline)


if __name__ == "__main__":
    main()
