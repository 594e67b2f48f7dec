"""Recorded steps: the trace is compared with the schedule and with a profile."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from conformance.oracle import tiny_llama
from conformance.training import CPU, Loader, batches, pipeline_config, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron.config import Config
from workbench.drawing.__main__ import main
from workbench.pipelines.engine import plan_pipeline
from workbench.pipelines.planning import training_schedule
from workbench.pipelines.recorder import record_steps
from workbench.schedules.checker import add_communication
from workbench.schedules.trace import read_trace


def recorded(config: Config, model_config: LlamaConfig) -> list[str]:
    """Take steps 4 and 5, and return the names of the actions in a profile of step 5."""
    model = wrapped(config, model_config)
    plan = plan_pipeline(config, model_config)
    step = record_steps(step_of(config, model_config), config, model_config, plan, CPU, done=3)
    step(model, Loader(batches(4)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, Loader(batches(4)))
    path = Path(config.checkpoint.save_dir, f"profile_{dist.get_rank()}.json")
    profile.export_chrome_trace(str(path))  # (`profile.events()` would demangle 2F0 as a C++ name)
    found = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    names = sorted((event["ts"], event["name"]) for event in found if event.get("cat") == "user_annotation")
    return [name for _, name in names if re.fullmatch(r"\(?[0-9]*[FBIW][0-9].*", name)]


@pytest.mark.parametrize(("engine", "more"), [("1f1b", {}), ("zbv", {"tp_size": 2})])
def test_trace_of_a_step_equals_its_schedule_and_profile(
    pool: WorkerPool, engine: str, more: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = pipeline_config(engine, 2, 4, logging__trace_steps=[5], checkpoint__save_dir=str(tmp_path), **more)
    model_config = tiny_llama(num_hidden_layers=4)
    names = pool.run(recorded, config.distributed.world_size, config, model_config)
    assert [path.name for path in tmp_path.iterdir()] == ["trace_step_00000005.jsonl"]
    step, timeline = read_trace(tmp_path)
    assert step == 5
    schedule = training_schedule(config)
    assert timeline.programs == list(map(list, schedule.programs))
    assert [[span.action for span in rank] for rank in timeline.spans] == add_communication(schedule)
    for rank in timeline.spans:  # a rank runs one action at a time
        assert all(first.end <= second.start for first, second in itertools.pairwise(rank))
    ranks = [0, 2] if "tp_size" in more else [0, 1]  # ranks of the first pipeline
    for rank, program in zip(ranks, schedule.programs, strict=True):
        assert names[rank] == list(map(str, program))
    searching = pipeline_config("auto", 2, 6, pp_recording=str(tmp_path), **more)
    assert plan_pipeline(searching, model_config).schedule.micro_batches == 6
    main(["measured", str(tmp_path), "--step", "5"])
    assert f"{tmp_path}, step 5, in seconds" in capsys.readouterr().out
