"""One process: picotron beside transformers' LlamaForCausalLM in a plain loop.  python -m benchmarks.single"""

from functools import partial

import torch

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import MICRO_BATCH, MICRO_BATCHES, ON_GPU, SEQ_LENGTH, arguments, model_config, ours, theirs
from picotron.metrics import flops_per_token, peak_flops


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if ON_GPU else None
    per_token = flops_per_token(model_config(), SEQ_LENGTH)
    mfu = (lambda rate: f"{rate * per_token / peak:.1%}") if peak else None
    for compiled in (False, True) if ON_GPU else (False,):
        baseline = "transformers, compiled" if compiled else "transformers"
        variants = [
            Variant(baseline, theirs, (1, False, compiled)),
            Variant(baseline.replace("transformers", "picotron"), partial(ours, compile=compiled), ({},)),
        ]
        results = measure(variants, options.turns, options.steps)
        print_table(results, SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES, baseline, mfu)


if __name__ == "__main__":
    main()
