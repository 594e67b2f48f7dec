"""The quickstart's model and step in any layout, for the programs that count and draw.

With `fake_rank`, a single process plays any rank, and every message counts as arrived immediately. So what is computed
there is meaningless, but what each rank holds and sends is right.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from picotron.config import Config
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model import load_model_config
from picotron.parallelize import build_model
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.schedules.plan import plan_pipeline
from picotron.train_step import make_train_step
from picotron.weights import initial_weights

CPU = torch.device("cpu")


def quickstart(**changes: Any) -> Config:
    """template/base_config.json on one process, with changes to the layout, or to gradient_accumulation_steps."""
    one_process = {"dp_size": 1, "pp_size": 1, "tp_size": 1}
    arguments = ["--config", "template/base_config.json"]
    for key, value in (one_process | changes).items():
        section = "training" if key == "gradient_accumulation_steps" else "distributed"
        arguments += [f"--{section}.{key}", str(value).lower()]
    return load_config(arguments)


def model_of(config: Config, dtype: torch.dtype = torch.float32) -> DataParallel:
    """This rank's part of the model, as train.py builds it."""
    model_config = load_model_config(config.model)
    weights = initial_weights(model_config, config.training.seed)
    return build_model(config, model_config, plan_pipeline(config, model_config), CPU, dtype, weights)


def stage_of(config: Config) -> PipelineParallel:
    """`model_of` without the wrapper of data parallelism."""
    stage = model_of(config).module
    assert isinstance(stage, PipelineParallel)
    return stage


def step_of(config: Config) -> Callable[[], Any]:
    """This rank's training step without the optimizer, ready to be called."""
    model, model_config = model_of(config), load_model_config(config.model)
    tokens = np.zeros(config.training.seq_length * config.global_batch_size + 1, np.uint16)
    loader = MicroBatchDataLoader(tokens, config, CPU)
    step = make_train_step(config, model_config, plan_pipeline(config, model_config), CPU, torch.float32)
    return lambda: step(model, loader)
