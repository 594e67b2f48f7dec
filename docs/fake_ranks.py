"""Be any rank of any layout, on one process: torch's fake process group does a message at once, and changes nothing.

What is computed is nonsense then. Who holds what, and how much of it, is not. (`picotron.explain` counts messages so.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from picotron.config import Config
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import load_model_config
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, hidden_states_shape
from picotron.pipeline_parallel.plan import make_plan
from picotron.process_group_manager import setup_process_group_manager
from train import build_model, pick_train_step

CPU = torch.device("cpu")


def quickstart(**changes: Any) -> Config:
    """template/base_config.json on one process, with changes to the layout, or to gradient_accumulation_steps."""
    alone = {"dp_size": 1, "pp_size": 1, "tp_size": 1}
    arguments = ["--config", "template/base_config.json"]
    for key, value in (alone | changes).items():
        section = "training" if key == "gradient_accumulation_steps" else "distributed"
        arguments += [f"--{section}.{key}", str(value).lower()]
    return load_config(arguments)


@contextmanager
def fake_rank(rank: int, config: Config) -> Iterator[None]:
    """Be this rank of a layout."""
    layout = config.distributed
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
        yield
    finally:
        dist.destroy_process_group()


def stage_of(config: Config) -> PipelineParallel:
    """This rank's part of the model, as train.py builds it."""
    model_config = load_model_config(config.model)
    return build_model(config, model_config, make_plan(config, model_config), CPU, torch.float32)


def step_of(config: Config) -> Callable[[], Any]:
    """What this rank does in a training step, ready to be called; without the optimizer."""
    stage = stage_of(config)
    model = DataParallelBucket(stage, groups=stage.parameters_by_stage())
    tokens = np.zeros(config.training.seq_length * config.global_batch_size + 1, np.uint16)
    loader = MicroBatchDataLoader(tokens, config, CPU)
    model_config = load_model_config(config.model)
    plan, shape = make_plan(config, model_config), hidden_states_shape(config, model_config)
    take_step = pick_train_step(config, plan, shape, CPU, torch.float32)
    return lambda: take_step(model, loader)
