"""Memory and time of a training step in float32 and in bfloat16, with and without recomputation:

    python -m docs.programs.trade_offs

The model is the quickstart's, on one process. Bytes are those of tensors, counted; time is that of the processor, the
median over rounds in which the variants take turns.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.context_parallel import LiveBytes
from docs.programs.count import MIB, number_of_parameters
from docs.programs.quickstart import model_of, quickstart, step_of
from picotron.console import text_table
from picotron.explain.fake_group import fake_rank
from picotron.optimizer import AdamW

ROUNDS = 7
CONFIG = quickstart(gradient_accumulation_steps=1)
VARIANTS = {
    "float32": (torch.float32, "none"),
    "float32, recomputation": (torch.float32, "full"),
    "bfloat16": (torch.bfloat16, "none"),
    "bfloat16, recomputation": (torch.bfloat16, "full"),
}


def state_bytes(dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the weights, and those of the gradients and the optimizer's state."""
    model = model_of(CONFIG, dtype)
    optimizer = AdamW(model.parameters(), CONFIG.training, fused=False)
    optimizer.step()
    weights, gradients = model.bytes_held()
    return weights, gradients + sum(t.nbytes for p in model.parameters() for t in optimizer.state_of(p).values())


def peak_bytes(step: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that exist at one time in a step, without weights, gradients and their state."""
    with LiveBytes() as live:
        step()
    return live.peak


def seconds(step: Callable[[], Any]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    parameters = number_of_parameters()
    with fake_rank(0, CONFIG.distributed):
        steps = {
            name: step_of(quickstart(gradient_accumulation_steps=1, activation_checkpointing=recompute), dtype)
            for name, (dtype, recompute) in VARIANTS.items()
        }
        peaks = {name: peak_bytes(step) for name, step in steps.items()}
        times = [{name: seconds(step) for name, step in steps.items()} for _ in range(ROUNDS)]
        rows = [["", "weights", "gradients and optimizer", "peak of other tensors, MiB", "time"]]
        for name, (dtype, _) in VARIANTS.items():
            state = (f"{size / parameters:.0f}" for size in state_bytes(dtype))
            ratio = statistics.median(each[name] / each["float32"] for each in times)
            rows.append([name, *state, f"{peaks[name] / MIB:.1f}", f"{ratio:.2f}"])
    print("Weights, gradients and optimizer in bytes per parameter; time relative to float32\n")
    print(text_table(rows, first_number=1))


if __name__ == "__main__":
    main()
