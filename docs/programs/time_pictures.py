"""Pictures of times, simulated or by formula:

python -m docs.programs.time_pictures buckets --out docs/pictures/buckets.svg
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from benchmarks.torch_schedules import CLASSES, torch_programs
from docs.programs.quickstart import quickstart, stage_of
from docs.programs.scoreboard import entries
from docs.programs.svg import GREY, RUNS, Span, main, plots, spans
from picotron.config import Model
from picotron.data_parallel.data_parallel import Bucket, make_buckets
from picotron.model.families import part_parameters
from workbench.drawing.draw_svg import COLOURS, LINE, WIDTH, Svg, lighter
from workbench.drawing.score import MEMORY, Setting, bound, peak, published
from workbench.explain.fake_group import fake_rank
from workbench.run.model_config import load_model_config
from workbench.schedules.nccl_step import simulate_nccl
from workbench.schedules.schedule_csv import assemble
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.search import fastest_schedule
from workbench.schedules.simulate import Costs, Timeline, memory_curves, simulate, summary

# Assumed for the clock of `buckets`: of a rank in FLOP/ms, of its link in bytes/ms, and of a collective in ms.
SPEED, BANDWIDTH, LATENCY = 100e6, 250e3, 0.3


class Part(NamedTuple):
    """A part of backward, after which the gradient of a parameter is complete."""

    parameter: nn.Parameter | None
    ms: float
    layer: int | None  # none for embedding and last norm
    label: str


def tint(kind: str, layer: int | None) -> str:
    """Return the colour of an action, darker in later layers."""
    return lighter(COLOURS[kind], 0.68 if layer is None else 0.17 * (3 - layer))


def backward_and_reductions(parts: list[Part], buckets: list[Bucket], dp: int, waits: bool) -> list[Span]:
    """Simulate backward and the all-reduces of the buckets, one after the other, each as soon as its bucket is full.

    Args:
        waits: whether backward waits for each all-reduce, as in DataParallelNaive.
    """
    number = {parameter: i for i, bucket in enumerate(buckets) for parameter in bucket.parameters}
    pending, now, free, works = Counter(number.values()), 0.0, 0.0, list[Span]()
    for part in parts:
        works.append(Span("backward", now, now + part.ms, tint("B", part.layer), part.label))
        now += part.ms
        if part.parameter is None:
            continue
        bucket = number[part.parameter]
        pending[bucket] -= 1
        if not pending[bucket]:
            start = max(now, free)
            free = start + LATENCY + 2 * (dp - 1) / dp * buckets[bucket].buffer.nbytes / BANDWIDTH
            works.append(Span("all-reduce", start, free, tint("R", part.layer), str(bucket)))
            now = free if waits else now
    return works


def buckets(dp: int = 2, bucket_mb: float = 0.7) -> str:
    """Draw backward of the quickstart's last micro-batch, and the all-reduces of its gradients."""
    config = quickstart(dp_size=dp)
    tokens, length = config.training.micro_batch_size * config.training.seq_length, config.training.seq_length
    with fake_rank(0, config.distributed):
        stage = stage_of(config)
        named = list(stage.module.named_parameters())[::-1]
        parts = []
        for name, parameter in named:
            words = name.split(".")
            layer = int(words[2]) if "layers" in words else None
            # A matrix costs two products of 2 FLOPs per element and token. The loss has computed the head's.
            flops = 4 * parameter.numel() * tokens if "_proj" in name else 0
            parts.append(Part(parameter, flops / SPEED, layer, words[-2].removesuffix("_proj")))
            if words[-2] == "o_proj":  # then backward of attention: twice 4 T H d FLOPs per token
                parts.append(Part(None, 8 * length * parameter.size(1) * tokens / SPEED, layer, "attn"))
        parameters = [parameter for _, parameter in named]
        variants = {
            "one all-reduce for each gradient, and backward waits (naive)": (0.0, True),
            "one bucket of 25 MiB, which is full when backward ends": (25.0, False),
            f"buckets of {bucket_mb} MiB, averaged while backward fills the next one": (bucket_mb, False),
        }
        works = {
            title: backward_and_reductions(parts, make_buckets(parameters, megabytes), dp, waits)
            for title, (megabytes, waits) in variants.items()
        }
    layers = [(tint("B", layer), f"layer {layer}") for layer in (3, 2, 1, 0)]
    keys = *layers, (tint("B", None), "embedding, last norm"), (COLOURS["R"], "all-reduce"), ("", "idle")
    unit = f"ms, simulated: {SPEED / 1e6:g} GFLOP/s, {BANDWIDTH / 1e3:g} MB/s, {LATENCY:g} ms per collective"
    return spans(works, ("backward", "all-reduce"), unit, keys=keys)


FORWARDS = "unit: the forward of one micro-batch through all stages of a pp rank"


def compared(
    timelines: dict[str, Timeline], unit: str = FORWARDS, activations: int = 0, notes: Sequence[str] = ()
) -> str:
    """Draw timelines on one time axis, with their titles.

    Args:
        activations: what the height of a curve of pp rank 0's activations stands for; 0 for no curves.
        notes: lines below the legend.
    """
    left, row, gap, curve, pp = 50, 22, 3, 30 * (activations > 0), len(next(iter(timelines.values())).spans)
    height, duration = pp * (row + gap) + curve + 46, max(timeline.step_time for timeline in timelines.values())
    scale, top = (WIDTH - left - 6) / duration, (1 + len(notes)) * LINE
    picture = Svg(WIDTH, top + height * len(timelines) + 3 * LINE)
    picture.legend(left, 0, *timelines.values())
    for number, note in enumerate(notes, start=1):
        picture.text(left, number * LINE + 17, note)
    for number, (title, timeline) in enumerate(timelines.items()):
        y = top + 12 + number * height
        picture.text(left, y + 14, title)
        for rank in range(pp):
            picture.text(0, y + LINE + rank * (row + gap) + 17, f"pp {rank}")
        picture.timeline(timeline, left, y + LINE, scale, row, gap)
        if activations:
            live, bottom = memory_curves(timeline)[0], y + LINE + pp * (row + gap) + curve
            picture.curve(live, timeline.step_time, left, bottom, scale, curve / activations)
    picture.time_axis(left, top + 6 + len(timelines) * height, scale, duration, unit)
    return str(picture)


def schedules(pp: int = 4, micro_batches: int = 8) -> str:
    """Draw all schedules, simulated with a backward that takes as long as two forwards."""
    timelines = {}
    for name in SCHEDULES:
        schedule = build(name, pp, micro_batches)
        timeline = simulate(schedule, Costs(weights=[1 / schedule.chunks] * schedule.num_stages))
        timelines[f"{name}: {', '.join(f'{what} {value}' for what, value in summary(timeline).items())}"] = timeline
    notes = [
        "Lighter: a later stage of the same rank. Half boxes: a forward and a backward that overlap.",
        f"Curve: activations of pp rank 0; its full height is {micro_batches} micro-batches.",
    ]
    return compared(timelines, activations=micro_batches, notes=notes)


def puzzle() -> str:
    """Draw the schedule that the search finds for level 7 of the Pipeline Schedule Tutor."""
    costs = Costs(B=1, I=1, W=9)  # W is too long to use
    found = fastest_schedule(pp=3, micro_batches=4, memory=3, options={(2, "loop"): costs})
    return compared({"7. Ragged rounds": simulate(found.schedule, costs)}, "slots")


def stall(name: str = "interleaved_1f1b", pp: int = 4, micro_batches: int = 8) -> str:
    """Draw a step on NCCL, with torch's order of the messages in one communicator, and with picotron's order in two.
    Grey bars are messages that wait.
    """
    programs, ours = torch_programs(name, pp, micro_batches), build(name, pp, micro_batches)
    costs = Costs(weights=[1 / ours.chunks] * ours.num_stages)
    timelines = {
        f"torch's {CLASSES[name].__name__}, one communicator": simulate_nccl(
            assemble(programs, name), costs, programs, "one"
        ),
        f"picotron's {name}, a communicator for each direction": simulate_nccl(ours, costs),
    }
    return compared({f"{title}: {each.step_time:g}": each for title, each in timelines.items()})


def trade_off(pp: int = 4, micro_batches: int = 8) -> str:
    """Draw the memory and the step time of all schedules that the scoreboard ranks, and what no schedule can beat."""
    setting, names = Setting(pp, micro_batches, "p", 0.0, "equal"), defaultdict[tuple[float, float], list[str]](list)
    drawn = [(entry.name, entry.schedule) for entry in entries()]
    for memory in MEMORY:
        found = published(setting._replace(memory=memory))
        drawn += [(name, each) for name, each in found if memory == "p" or name.startswith("search")]
    for name, schedule in drawn:
        if (schedule.pp, schedule.micro_batches) == (pp, micro_batches):
            step_time = simulate(schedule, setting.costs(schedule.chunks)).step_time
            names[peak(schedule), step_time].append(name)
    longest, limits = max(time for _, time in names), [quarter / 4 for quarter in range(4, 4 * micro_batches + 3)]
    least = [bound(setting, limit) for limit in limits]

    def draw(panel: Any) -> None:
        panel.step(limits, least, where="post", color=RUNS[0], linewidth=3)
        panel.vlines(limits[0], least[0], longest, RUNS[0], linewidth=3)
        panel.plot(*zip(*names, strict=True), "o", color=RUNS[1])
        points = sorted(names)
        for number, point in enumerate(points, start=1):
            panel.annotate(str(number), point, (6, -4), textcoords="offset points")
        lines = [f"{number}: {', '.join(names[point])}" for number, point in enumerate(points, start=1)]
        panel.text(0.28, 0.97, "\n".join(lines), transform=panel.transAxes, va="top")
        panel.set_xlabel("activations on the fullest rank, in micro-batches (line: no step is shorter)")
        panel.set_ylabel("step time")

    return plots(1, 1, 0.6, draw)


MODEL, RANKS = "docs/llama-3.1-8b", 8
PLACES = {"NVLink": 989e12 / 450e9, "network": 989e12 / 50e9}  # FLOPs per byte


def rules() -> dict[str, Callable[[float, int], float]]:
    """Return the ratio of each axis, for FLOPs per byte and the number of tokens of a micro-batch on one rank."""
    model = load_model_config(Model(name=MODEL))
    layer, D, layers = part_parameters(model)[0], model.hidden_size, model.num_hidden_layers
    return {
        "dp, gradients": lambda ratio, t: 2 * ratio / t,
        "zero3, weights and gradients": lambda ratio, t: 1.5 * ratio / t,
        f"tp {RANKS}, hidden states": lambda ratio, t: 4 * ratio * RANKS * D / layer,
        f"cp {RANKS}, keys and values": lambda ratio, t: 2 * ratio * model.num_key_value_heads / model.num_attention_heads / t,
        f"pp {RANKS}, hidden states": lambda ratio, t: 2 / 3 * ratio * D / (layers // RANKS * layer),
    }  # fmt: skip


def axis_rules() -> str:
    """Draw the five rules of docs/when_an_axis_pays.md, from the rates of an H100's data sheet: the ratio of an axis's
    messages to the computation beside them, of which only matrix products count, over the number of tokens. In the
    grey area, computation hides the messages.
    """

    def draw(*panels: Any) -> None:
        tokens = [2**exponent for exponent in range(8, 17)]
        for panel, (name, ratio) in zip(panels, PLACES.items(), strict=True):
            for colour, (axis, rule) in zip(RUNS, rules().items(), strict=True):
                panel.loglog(tokens, [rule(ratio, t) for t in tokens], color=colour, linewidth=3, label=axis)
            panel.set(title=name, xlabel="tokens of a micro-batch on a rank", ylim=(1e-3, 1e3))
            panel.axhspan(1e-3, 1, color=GREY, alpha=0.25)
        panels[0].set_ylabel("time of messages / time of computation")
        panels[0].legend(loc="upper right")

    return plots(1, 2, 0.5, draw)


if __name__ == "__main__":
    main(__doc__, axis_rules, buckets, schedules, trade_off, puzzle, stall)
