"""Checks of a whole run, before any process group exists."""

import os

from transformers import LlamaConfig

from picotron.config import Config
from picotron.errors import Problems
from picotron.launch import check_world_size
from picotron.model_config import load_model_config
from picotron.parallelize import check_layout
from picotron.schedules.plan import PipelinePlan


def check_model(config: Config) -> tuple[LlamaConfig, PipelinePlan]:
    """Load the model's config, and check that the model can run in the config's layout.

    Returns:
        The model's config and the plan of the pipeline.

    Raises:
        UserError: `load_model_config` or `check_layout` fails.
    """
    model_config = load_model_config(config.model)
    return model_config, check_layout(config, model_config)


def check_run(config: Config) -> tuple[LlamaConfig, PipelinePlan]:
    """Check the number of processes that torchrun has started, and the model as `check_model` does."""
    problems = Problems()
    with problems:
        check_world_size(config.distributed, int(os.environ.get("WORLD_SIZE", 1)))
    with problems:
        found = check_model(config)
    problems.report()
    return found
