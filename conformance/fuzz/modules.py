"""Random pipelines of modules that are not Llamas, against plain autograd and torch's AdamW on one process."""

import random
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from conformance.fuzz.toy_pipelines import ENGINES, KINDS, WRAPPERS, schedule_of, train_modules, train_pipeline
from picotron import process_group_manager as pgm

Case = dict[str, Any]
ARGUMENTS = ("kind", "engine", "pp", "m", "dp_engine", "frozen", "is_unequal")


def draw_modules(dice: random.Random) -> Case:
    """Draw a pipeline of at most 4 ranks. The keys of a case are arguments of `train_pipeline`, and dp."""
    pp = dice.choice((2, 2, 4))
    case = {
        "kind": dice.choice(list(KINDS)),
        "engine": dice.choice(ENGINES),
        "pp": pp,
        "dp": dice.choice((1, 4 // pp)),
        "m": dice.randint(1, 9),
        "dp_engine": dice.choice(list(WRAPPERS)),
        "is_unequal": dice.random() < 0.7,
    }
    stages = schedule_of(case["engine"], pp, case["m"]).num_stages
    if case["kind"] == "layers, loss":
        stages -= 1  # the last one has no parameters
    frozen = sorted(dice.sample(range(stages), dice.randint(0, stages - 1))) if dice.random() < 0.3 else []
    return case | {"frozen": frozen}


def train_stages(case: Case) -> dict[str, Any]:
    """Train this rank's stages. Returns losses, gradient norms, and the weights of all stages."""
    found = train_pipeline(*(case["modules"][name] for name in ARGUMENTS))
    stages: list[Any] = [None] * case["modules"]["pp"]
    dist.all_gather_object(stages, found["weights"], group=pgm.process_group_manager.pp_group)
    weights = {key: weight for each in stages for key, weight in each.items()}
    return {"losses": found["losses"].tolist(), "norms": found["norms"].tolist(), "weights": weights}


def expected(case: Case) -> dict[str, Any]:
    """Train the case on one process."""
    modules = case["modules"]
    stages = schedule_of(modules["engine"], modules["pp"], modules["m"]).num_stages
    count = modules["m"] * modules["dp"]
    right = train_modules(modules["kind"], stages, count, modules["frozen"], modules["is_unequal"])
    return right | {"losses": right["losses"].tolist(), "norms": right["norms"].tolist()}


def smaller_modules(case: Case) -> Iterator[Case]:
    """Yield simpler variants of a case, the simplest first."""
    modules = case["modules"]
    simple = {"dp": 1, "frozen": [], "is_unequal": False, "dp_engine": "bucket", "engine": "1f1b", "kind": "layers"}
    for key, value in simple.items():
        if modules[key] != value:
            frozen = {"frozen": []} if key == "engine" else {}  # other stages
            yield {"modules": modules | {key: value} | frozen}
    for less in (1, modules["m"] // 2, modules["m"] - 1):
        if 1 <= less < modules["m"]:
            yield {"modules": modules | {"m": less, "frozen": []}}
