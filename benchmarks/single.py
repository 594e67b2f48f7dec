"""One process: picotron compared with transformers' LlamaForCausalLM in a plain training loop.

python -m benchmarks.single
"""

from functools import partial

import torch

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import (
    MICRO_BATCH,
    MICRO_BATCHES,
    ON_GPU,
    SEQ_LENGTH,
    arguments,
    model_config,
    picotron_step,
    transformers_step,
)
from picotron.model.flops import model_cost
from picotron.run.metrics import peak_flops


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if ON_GPU else None
    flops_per_token = model_cost(model_config(), SEQ_LENGTH).flops
    mfu = (lambda rate: f"{rate * flops_per_token / peak:.1%}") if peak else None
    for compiled in (False, True) if ON_GPU else (False,):
        suffix = ", compiled" if compiled else ""
        baseline = f"transformers{suffix}"
        variants = [
            Variant(baseline, transformers_step, (1, False, compiled)),
            Variant(f"picotron{suffix}", partial(picotron_step, compile=compiled), ({},)),
        ]
        results = measure(variants, options.turns, options.steps)
        print_table(results, SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES, baseline, mfu)


if __name__ == "__main__":
    main()
