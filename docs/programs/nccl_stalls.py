"""How much longer steps take because NCCL runs the messages of a communicator in the order of the calls, one by one:

    python -m docs.programs.nccl_stalls

A backward takes as long as two forwards, and messages take no time. All stages take the same time or, "unequal", times
that differ at random by up to 30 % from it: the mean and the maximum of 20 draws.
"""

import random
from collections.abc import Iterator
from statistics import mean

from benchmarks.torch_schedules import CLASSES, torch_programs
from workbench.console import text_table
from workbench.schedules.nccl_step import Communicators, simulate_nccl
from workbench.schedules.schedule_csv import assemble
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.simulate import Costs, simulate

SIZES = ((4, 8), (8, 16))  # p, m
OF_TORCH: dict[Communicators, str] = {"one": "one communicator", "pairs": "one for each pair"}


def cells(name: str, communicators: Communicators) -> Iterator[str]:
    """Yield by how many percent steps of a schedule are longer; of torch's with the communicators of OF_TORCH."""
    for size in SIZES:
        programs = torch_programs(name, *size) if communicators in OF_TORCH else ()
        schedule = assemble(programs, name) if programs else build(name, *size, 2 if name in CLASSES else None)
        draw, more = random.Random(1), []
        for spread in [0.0] + 20 * [0.3]:
            costs = Costs(weights=[draw.uniform(1 - spread, 1 + spread) for _ in range(schedule.num_stages)])
            played = simulate_nccl(schedule, costs, programs, communicators)
            more.append(100 * (played.step_time / simulate(schedule, costs).step_time - 1))
        yield f"{more[0]:4.1f}; {mean(more[1:]):4.1f} {max(more[1:]):4.1f}"


def rows() -> Iterator[list[str]]:
    yield ["percent: equal stages; unequal ones, mean and maximum", *(f"p {p}, m {m}" for p, m in SIZES)]
    for name in SCHEDULES:
        yield [f"{name}, picotron", *cells(name, "directions")]
        for communicators, meaning in OF_TORCH.items() if name in CLASSES else ():
            yield [f"    torch's {CLASSES[name].__name__}, {meaning}", *cells(name, communicators)]


if __name__ == "__main__":
    print(text_table(list(rows())))
