"""Tables of pipeline schedules: step time and memory, compared with torch's schedules and with the zero-bubble paper.

    python -m docs.programs.schedule_tables

The unit of time is the forward of one micro-batch through all stages of a rank; I and W take 1 each, B takes 2, and
messages take no time. The unit of memory is the activations of one micro-batch in all stages of a rank.
"""

from collections.abc import Iterator

from benchmarks.torch_schedules import CLASSES, torch_programs
from benchmarks.zero_bubble import CASES
from workbench.console import text_table
from workbench.schedules.actions import Schedule
from workbench.schedules.schedule_csv import assemble
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.search import fastest_schedule, shapes
from workbench.schedules.simulate import Costs, peak_activations, simulate

SIZES = ((4, 8), (8, 32), (16, 64))  # p, m
ENGINES = [
    (name, chunks)
    for name, recipe in SCHEDULES.items()
    for chunks in ({recipe.chunks, 2, 4} if recipe.has_groups else {recipe.chunks})
]


def equal_stages(schedule: Schedule) -> Costs:
    return Costs(weights=[1 / schedule.chunks] * schedule.num_stages)


def cell(schedule: Schedule) -> str:
    peak = max(map(peak_activations, schedule.programs)) / schedule.chunks
    return f"{simulate(schedule, equal_stages(schedule)).step_time:g}, {peak:g}"


def searched(pp: int, micro_batches: int, memory: int) -> Schedule:
    options = {shape: Costs(weights=[1 / shape[0]] * (pp * shape[0])) for shape in shapes(None)}
    return fastest_schedule(pp, micro_batches, memory, options).schedule


def steps() -> Iterator[list[str]]:
    yield ["step time, peak activations", *(f"p {p}, m {m}" for p, m in SIZES)]
    for name, chunks in ENGINES:
        label = f"{name}, v {chunks}"
        yield [label, *(cell(build(name, p, m, chunks)) for p, m in SIZES)]
        if name in CLASSES:
            found = [
                cell(assemble(torch_programs(name, p, m, chunks), name)) if m >= 2 * p or name != "dualpipev" else "-"
                for p, m in SIZES
            ]
            yield [f"    torch's {CLASSES[name].__name__}", *found]
    for factor in (1, 2):
        yield [f"auto, memory {factor} p".replace(" 1 p", " p"), *(cell(searched(p, m, factor * p)) for p, m in SIZES)]


def zero_bubble() -> Iterator[list[str]]:
    yield [
        "model",
        "p",
        "m",
        *(f"{name}, {who}" for name in ("1F1B", "ZB-H1", "ZB-1p", "ZB-2p") for who in ("paper", "here")),
    ]
    for case in CASES:
        if case.p < 32:
            rates = [case.of_1f1b, case.rate_of("1f1b"), case.of_zb_h1, case.rate_of("zb_h1")]
            rates += [case.of_zb_1p, case.searched_rate(case.p), case.of_zb_2p, case.searched_rate(2 * case.p)]
            yield [case.model, str(case.p), str(case.m), *(f"{rate:.4f}" for rate in rates)]


if __name__ == "__main__":
    print(text_table(list(steps()), first_number=1), end="\n\n")
    print(text_table(list(zero_bubble()), first_number=1))
