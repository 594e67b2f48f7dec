"""Two data-parallel processes: picotron beside DistributedDataParallel.  python -m benchmarks.data_parallel"""

import torch

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import MICRO_BATCH, MICRO_BATCHES, ON_GPU, SEQ_LENGTH, arguments, ours, theirs

DP = 2


def main() -> None:

    if ON_GPU and torch.cuda.device_count() < DP:
        raise SystemExit(
            f"this benchmark needs {DP} GPUs; on the CPU it runs with CUDA_VISIBLE_DEVICES= set to nothing"
        )
    options = arguments(__doc__ or "").parse_args()
    ddp = "transformers, DistributedDataParallel"
    variants = [
        Variant(ddp, theirs, (DP, True), DP),
        Variant("picotron, DataParallelBucket", ours, ({"dp_size": DP},), DP),
        Variant("picotron, DataParallelNaive", ours, ({"dp_size": DP}, "naive"), DP),
    ]
    results = measure(variants, options.turns, options.steps)
    print_table(results, SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES * DP, ddp)


if __name__ == "__main__":
    main()
