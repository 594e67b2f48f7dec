"""Timelines as text."""

import bisect
import math
from collections.abc import Sequence

from workbench.drawing.draw_svg import MEANING, kinds
from workbench.schedules.actions import Overlapped
from workbench.schedules.simulate import Timeline, computes, memory_curves, tick_distance

BLOCKS = " ▁▂▃▄▅▆▇█"


def as_text(timeline: Timeline, width: int) -> str:
    """Draw a timeline as text: a line for each rank, below it a curve of its activations, and at the end a time axis
    and a legend. If names like 2F0 do not fit, an action is shown as a letter: its kind, or X for an overlapped pair,
    in lower case for every other chunk.

    Args:
        width: largest width of the timeline, in characters.
    """
    spans = [[span for span in rank if computes(span.action) and span.end > span.start] for rank in timeline.spans]
    longest_name = max(len(str(action)) for rank in spans for action, _, _ in rank)
    shortest = min(end - start for rank in spans for _, start, end in rank)
    names_fit = timeline.step_time / shortest * (longest_name + 1) <= width
    scale = (longest_name + 1) / shortest if names_fit else min(1 / shortest, width / timeline.step_time)
    lines = []
    for rank in spans:
        stages = sorted({part.stage for action, _, _ in rank for part in action.parts})
        line = ["."] * round(timeline.step_time * scale)
        for action, start, end in rank:
            first, last = round(start * scale), round(end * scale)
            if names_fit:
                text = str(action).ljust(last - first - 1, "-") + " "
            else:
                letter = "X" if isinstance(action, Overlapped) else action.kind
                odd_chunk = stages.index(action.parts[0].stage) % 2
                text = (letter.lower() if odd_chunk else letter).ljust(last - first, "-")
            line[first:last] = text[: last - first]
        lines.append("".join(line).rstrip())
    curves = memory_curves(timeline)
    peak = max(live for curve in curves for _, live in curve)
    drawn = []
    for number, (text, curve) in enumerate(zip(lines, curves, strict=True)):
        drawn += [f"pp {number}  {text}", "      " + memory_line(curve, peak, len(text), scale)]
    return "\n".join(
        [
            *(line.rstrip() for line in drawn if line.strip()),
            time_line(timeline, scale),
            legend(timeline, peak, names_fit),
        ]
    )


def memory_line(curve: Sequence[tuple[float, float]], peak: float, length: int, scale: float) -> str:
    """Draw a curve of activations as blocks, each `1 / scale` wide; a full block is `peak`."""
    times = [time for time, _ in curve]
    live = [curve[bisect.bisect_right(times, (column + 0.5) / scale) - 1][1] for column in range(length)]
    return "".join(BLOCKS[math.ceil(8 * each / peak) if peak else 0] for each in live)


def time_line(timeline: Timeline, scale: float) -> str:
    """Draw a time axis: each number begins at its time."""
    length, line = round(timeline.step_time * scale), ""
    distance = tick_distance(timeline.step_time, most=max(1, length // 10))
    for time in (distance * i for i in range(math.floor(timeline.step_time / distance) + 1)):
        if round(time * scale) + len(f"{time:g}") <= length:
            line = line.ljust(round(time * scale)) + f"{time:g} "
    return f"time  {line.rstrip()}"


def legend(timeline: Timeline, peak: float, has_names: bool) -> str:
    """Explain the symbols that occur."""
    names = [f"{kind} {MEANING[kind]}" for kind in kinds(timeline) if kind != "R"]
    actions = [action for program in timeline.programs for action in program]
    if not has_names and any(isinstance(action, Overlapped) for action in actions):
        names.append("X overlapped forward and backward")
    if not has_names and len({part.stage for action in actions for part in action.parts}) > len(timeline.spans):
        names.append("lower case every other chunk")
    memory = f"; below each rank its activations, █ = {peak:.4g} {timeline.memory_unit}" if peak else ""
    return f"{', '.join(names)}, . idle{memory}"
