"""Errors and regret of the forecast on this machine: its rates are measured, then twelve layouts are forecast and run.

python -m benchmarks.forecast_here
"""

import os
import statistics
import tempfile
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.side_by_side import Variant, check_same_losses, measure, print_markdown
from benchmarks.workload import TINY, arguments, model_config, picotron_step, require_gpus, run_config
from workbench.explain.measure import find_hardware
from workbench.explain.step_time import forecast
from workbench.pipelines.engine import plan_pipeline

HALF = {"gradient_accumulation_steps": 2}  # of the micro-batches, on each of two dp ranks: all have the same batch
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of the sections distributed and training
    "one process": ({}, {}),
    "one process, micro-batches of 4": ({}, {"micro_batch_size": 4, "gradient_accumulation_steps": 2}),
    "one process, recomputation": ({}, {"activation_checkpointing": "full"}),
    "dp 2": ({"dp_size": 2}, HALF),
    "dp 2, zero1": ({"dp_size": 2, "dp_engine": "zero1"}, HALF),
    "dp 2, zero3": ({"dp_size": 2, "dp_engine": "zero3"}, HALF),
    "tp 2": ({"tp_size": 2}, {}),
    "tp 2, sequence parallelism": ({"tp_size": 2, "sequence_parallel": True}, {}),
    "cp 2": ({"cp_size": 2}, {}),
    "pp 2, 1f1b": ({"pp_size": 2}, {}),
    "pp 2, interleaved_1f1b": ({"pp_size": 2, "pp_engine": "interleaved_1f1b"}, {}),
    "pp 2, zbv": ({"pp_size": 2, "pp_engine": "zbv"}, {}),
}
LAYERS = 4  # few, because the processes of all layouts stay in memory and take turns


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    require_gpus(2)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        hardware = find_hardware("H200" if TINY else "this", run_config({}))  # measured now, not read from the cache
    variants = []
    for name, (layout, training) in LAYOUTS.items():
        step = partial(picotron_step, shape=model_config(LAYERS), **training)
        variants.append(Variant(name, step, (layout,), run_config(layout).distributed.world_size))
    results = measure(variants, options.turns, options.steps)
    check_same_losses(results)
    rows = [["layout", "measured, s", "forecast, s", "error"]]
    measured, expected = [], []
    for name, (seconds, _, _) in results.items():
        layout, training = LAYOUTS[name]
        config, model = run_config(layout, **training), model_config(LAYERS)
        step = forecast(config, model, plan_pipeline(config, model), hardware).step_time
        measured.append(statistics.median(seconds))
        expected.append(step)
        rows.append([name, f"{measured[-1]:.2f}", f"{step:.2f}", f"{step / measured[-1] - 1:+.1%}"])
    print(hardware)
    print_markdown(rows)
    errors = [abs(theirs / ours - 1) for theirs, ours in zip(expected, measured, strict=True)]
    regret = measured[expected.index(min(expected))] / min(measured) - 1
    correlation = np.corrcoef([np.argsort(np.argsort(each)) for each in (measured, expected)])[0, 1]  # of ranks
    print(f"\nMedian error {statistics.median(errors):.1%}, rank correlation {correlation:.2f}, regret {regret:.1%}.")


if __name__ == "__main__":
    main()
