"""Two data-parallel processes: picotron compared with transformers' model in DistributedDataParallel.

python -m benchmarks.data_parallel
"""

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import (
    MICRO_BATCH,
    MICRO_BATCHES,
    SEQ_LENGTH,
    arguments,
    picotron_step,
    require_gpus,
    transformers_step,
)

DP = 2


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    require_gpus(DP)
    ddp = "transformers, DistributedDataParallel"
    variants = [
        Variant(ddp, transformers_step, (DP, True), DP),
        Variant("picotron, DataParallelBucket", picotron_step, ({"dp_size": DP},), DP),
        Variant("picotron, DataParallelNaive", picotron_step, ({"dp_size": DP, "dp_engine": "naive"},), DP),
    ]
    results = measure(variants, options.turns, options.steps)
    print_table(results, SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES * DP, ddp)


if __name__ == "__main__":
    main()
