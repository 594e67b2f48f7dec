"""Puzzle 16, layout: 70 billion parameters on 1,024 GPUs.

To read: docs/seventy_billion.md and docs/when_an_axis_pays.md. Check your answer with `python -m puzzles 16`.
"""

from typing import Any


def layout() -> dict[str, Any]:
    """Return settings with which Llama-3.1-70B trains fast on 1,024 H100s, by name.

    The format, with a layout that does not fit: {"dp_size": 64, "tp_size": 16, "micro_batch_size": 16,
    "gradient_accumulation_steps": 1}. The product of dp_size, pp_size, cp_size and tp_size (1 if left out) is 1024.
    A step has 1,024 sequences of 4,096 tokens: the product of micro_batch_size, gradient_accumulation_steps and
    dp_size. No rank may need more than 92 % of 79.1 GiB. Other keys that matter: sequence_parallel, pp_engine,
    pp_chunks, dp_engine and activation_checkpointing; see `python train.py --help`. Time and memory are the estimates
    of `train.py --explain --hardware H100`.

    Score: the time of a step. Par is 5 % less than that of docs/seventy_billion.json. The best known
    time was found by a search.
    """
    raise NotImplementedError
