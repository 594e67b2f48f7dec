"""Solution of puzzle 16: with ZeRO-3, few tp ranks are enough, and a step has few messages that nothing hides."""

from typing import Any


def layout() -> dict[str, Any]:
    return {
        "dp_size": 256,
        "tp_size": 4,
        "sequence_parallel": True,
        "dp_engine": "zero3",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": "full",
    }
