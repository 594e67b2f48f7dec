"""Recorded steps: the trace is compared with the schedule."""

import itertools
from pathlib import Path

import pytest
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from tests.support.oracle import make_config, tiny_llama
from tests.support.training import CPU, batches, step_of, wrapped
from workbench.drawing.__main__ import main
from workbench.pipelines.engine import BatchList, plan_pipeline
from workbench.pipelines.planning import training_schedule
from workbench.pipelines.recorder import record_steps
from workbench.schedules.checker import add_communication
from workbench.schedules.trace import read_trace


def recorded(config: Config, model_config: LlamaConfig) -> None:
    """Take steps 4 and 5."""
    model = wrapped(config, model_config)
    plan = plan_pipeline(config, model_config)
    step = record_steps(step_of(config, model_config), config, model_config, plan, CPU, done=3)
    for _ in range(2):
        step(model, BatchList(batches(4)))


@pytest.mark.parametrize("layout", ["pp2 1f1b", "pp2 zbv tp2"])
def test_trace_of_a_step_equals_its_schedule(
    pool: WorkerPool, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"logging__trace_steps": [5], "checkpoint__save_dir": str(tmp_path)}
    config = make_config(f"{layout} m4", **keys)
    model_config = tiny_llama(num_hidden_layers=4)
    pool.run(recorded, config.distributed.world_size, config, model_config)
    assert [path.name for path in tmp_path.iterdir()] == ["trace_step_00000005.jsonl"]
    step, timeline = read_trace(tmp_path)
    assert step == 5
    schedule = training_schedule(config)
    assert timeline.programs == list(map(list, schedule.programs))
    assert [[span.action for span in rank] for rank in timeline.spans] == add_communication(schedule)
    for rank in timeline.spans:  # a rank runs one action at a time
        assert all(first.end <= second.start for first, second in itertools.pairwise(rank))
    searching = make_config(f"{layout} m6", pp_engine="auto", pp_recording=str(tmp_path))
    assert plan_pipeline(searching, model_config).schedule.micro_batches == 6
    main(["measured", str(tmp_path), "--step", "5"])
    assert f"{tmp_path}, step 5, in seconds" in capsys.readouterr().out
