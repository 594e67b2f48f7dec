"""The micro-batches that keep their activations although a run recomputes those of the others. No torch here."""

from collections.abc import Sequence

from picotron.schedules.actions import AnyAction


def kept_activations(program: Sequence[AnyAction], limit: int) -> set[tuple[int, int]]:
    """Choose the forwards of a rank that keep their activations: each one that starts while fewer than `limit` of those
    that were chosen before it wait for their backward. With 1F1B, these are the first `limit` micro-batches of each
    window of as many as are in flight (`num_microbatches_with_partial_activation_checkpoints` in Megatron-LM).

    Args:
        program: the actions of a rank.
        limit: number of (stage, micro-batch) whose activations fit in memory at the same time.

    Returns:
        (stage, micro-batch) of these forwards.
    """
    kept: set[tuple[int, int]] = set()
    in_flight: set[tuple[int, int]] = set()
    for action in program:
        for kind, stage, microbatch in action.parts[::-1]:  # the executor runs the backward of a pair first
            if kind == "F" and len(in_flight) < limit:
                kept.add((stage, microbatch))
                in_flight.add((stage, microbatch))
            elif kind in ("B", "I"):
                in_flight.discard((stage, microbatch))
    return kept
