"""Errors of the forecast on this machine: its rates are measured, then twelve layouts are forecast and run.

python -m benchmarks.forecast_here
"""

import os
import statistics
import tempfile
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.forecast import rank_correlation
from benchmarks.side_by_side import Measurement, Variant, check_same_losses, measure, print_markdown
from benchmarks.workload import TINY, arguments, model_config, picotron_step, require_gpus, run_config
from workbench.explain.measure import find_hardware
from workbench.explain.step_time import forecast
from workbench.pipelines.engine import plan_pipeline

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of the sections distributed and training
    "one process": ({}, {}),
    "one process, micro-batches of 4": ({}, {"micro_batch_size": 4, "gradient_accumulation_steps": 2}),
    "one process, recomputation": ({}, {"activation_checkpointing": "full"}),
    "dp 2": ({"dp_size": 2}, {}),
    "dp 2, zero1": ({"dp_size": 2, "dp_engine": "zero1"}, {}),
    "dp 2, zero3": ({"dp_size": 2, "dp_engine": "zero3"}, {}),
    "tp 2": ({"tp_size": 2}, {}),
    "tp 2, sequence parallelism": ({"tp_size": 2, "sequence_parallel": True}, {}),
    "cp 2": ({"cp_size": 2}, {}),
    "pp 2, 1f1b": ({"pp_size": 2}, {}),
    "pp 2, interleaved_1f1b": ({"pp_size": 2, "pp_engine": "interleaved_1f1b"}, {}),
    "pp 2, zbv": ({"pp_size": 2, "pp_engine": "zbv"}, {}),
}
TOGETHER = 3  # layouts that take turns; the processes of all of them stay in memory


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    require_gpus(2)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        hardware = find_hardware("H200" if TINY else "this", run_config({}))  # measured now, not read from the cache
    variants = [
        Variant(name, partial(picotron_step, **training), (layout,), run_config(layout).distributed.world_size)
        for name, (layout, training) in LAYOUTS.items()
    ]
    results: dict[str, Measurement] = {}
    for i in range(0, len(variants), TOGETHER):
        results |= measure(variants[i : i + TOGETHER], options.turns, options.steps)
    for dp in (1, 2):  # which has a global batch of its own
        check_same_losses({name: each for name, each in results.items() if LAYOUTS[name][0].get("dp_size", 1) == dp})
    rows = [["layout", "measured, s", "forecast, s", "error"]]
    measured, expected = [], []
    for name, (seconds, _, _) in results.items():
        layout, training = LAYOUTS[name]
        config, model = run_config(layout, **training), model_config()
        step = forecast(config, model, plan_pipeline(config, model), hardware).step_time
        measured.append(statistics.median(seconds))
        expected.append(step)
        rows.append([name, f"{measured[-1]:.2f}", f"{step:.2f}", f"{step / measured[-1] - 1:+.1%}"])
    print(hardware)
    print_markdown(rows)
    errors = [abs(theirs / ours - 1) for theirs, ours in zip(expected, measured, strict=True)]
    correlation = rank_correlation(measured, expected)
    print(f"\nMedian error {statistics.median(errors):.1%}, rank correlation {correlation:.2f}.")


if __name__ == "__main__":
    main()
