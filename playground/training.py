"""The command that trains with a schedule of the playground."""

import shlex

from picotron.console import UserError
from playground.requests import Request
from workbench.pipelines.layouts import count_layers
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import SCHEDULES

CONFIG = "template/base_config.json"
LAYERS = 4  # of the model in CONFIG


def training_command(request: Request, schedule: Schedule) -> str:
    """Return the command that trains the quickstart's model with a schedule. It expects the programs of a
    schedule that is not hand-made in the file schedule.csv.

    Raises:
        UserError: there is one rank, whose steps have no schedule.
    """
    if schedule.pp == 1:
        raise UserError("one rank is no pipeline, and trains without a schedule; set Ranks to at least 2")
    by_name = request.schedule in SCHEDULES
    options: dict[str, object] = {
        "distributed.dp_size": 1,
        "distributed.tp_size": 1,
        "distributed.pp_size": schedule.pp,
        "distributed.pp_engine": request.schedule if by_name else "csv:schedule.csv",
        "training.gradient_accumulation_steps": schedule.micro_batches,
    }
    if by_name and SCHEDULES[request.schedule].any_chunks:
        options["schedule.pp_chunks"] = schedule.chunks
    if by_name and SCHEDULES[request.schedule].has_groups and request.group_size:
        options["schedule.pp_group_size"] = request.group_size
    if request.layout:
        options["schedule.pp_layout"] = shlex.quote(request.layout)
    layers = count_layers(request.layout) if request.layout else max(LAYERS, schedule.num_stages)
    if layers != LAYERS:
        options["model.num_hidden_layers"] = layers
    options |= {"checkpoint.save_dir": "runs/playground", "logging.trace_steps": "[5]"}
    lines = [f"python train.py --config {CONFIG}"]
    lines += [f"    --{key} {value}" for key, value in options.items()]
    return " \\\n".join(lines)
