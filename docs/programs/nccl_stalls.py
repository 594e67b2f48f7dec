"""How much longer steps take because NCCL runs the messages of a communicator in the order of the calls, one by one:

    python -m docs.programs.nccl_stalls

A backward takes as long as two forwards, and messages take no time. All stages take the same time or, "unequal", times
that differ at random by up to 30 % from it: the mean and the maximum of 20 draws.
"""

import random
from collections.abc import Iterator
from statistics import mean

from picotron.console import text_table
from tests.support.torch_schedules import CLASSES, torch_programs
from workbench.schedules.nccl_step import Communicators, simulate_nccl
from workbench.schedules.schedule_csv import assemble
from workbench.schedules.schedules import SCHEDULES, build
from workbench.schedules.simulate import Costs, simulate

SIZES = ((4, 8), (8, 16))  # p, m
DRAWS = 20
COMMUNICATORS: dict[Communicators, str] = {"one": "one communicator", "pairs": "one for each pair"}


def stalls(name: str, pp: int, micro_batches: int, of_torch: bool, communicators: Communicators) -> str:
    """Return by how much the steps of a schedule with equal stages are longer, and those with unequal ones."""
    programs = torch_programs(name, pp, micro_batches) if of_torch else ()
    schedule = assemble(programs, name) if of_torch else build(name, pp, micro_batches)
    draw, found = random.Random(1), []
    for number in range(1 + DRAWS):
        costs = Costs(weights=[draw.uniform(0.7, 1.3) if number else 1.0 for _ in range(schedule.num_stages)])
        played = simulate_nccl(schedule, costs, programs, communicators)
        found.append(100 * (played.step_time / simulate(schedule, costs).step_time - 1))
    equal, *unequal = found
    return f"{equal:4.1f}; {mean(unequal):4.1f} {max(unequal):4.1f}"


def rows() -> Iterator[list[str]]:
    yield ["percent: equal stages; unequal ones, mean and maximum", *(f"p {p}, m {m}" for p, m in SIZES)]
    for name in SCHEDULES:
        yield [f"{name}, picotron", *(stalls(name, *size, False, "directions") for size in SIZES)]
        if name in CLASSES:
            for communicators, meaning in COMMUNICATORS.items():
                label = f"    torch's {CLASSES[name].__name__}, {meaning}"
                yield [label, *(stalls(name, *size, True, communicators) for size in SIZES)]


if __name__ == "__main__":
    print(text_table(list(rows())))
