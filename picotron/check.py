"""Can this model run in this layout? The answer before any process group exists, for train.py and create_config.py."""

from transformers import LlamaConfig

from picotron.config import Config
from picotron.context_parallel.context_parallel import check_context_parallel
from picotron.pipeline_parallel.plan import Plan, make_plan
from picotron.tensor_parallel.tensor_parallel import check_tensor_parallel


def check_layout(config: Config, model_config: LlamaConfig) -> Plan:
    """What the pipeline does, if every parallelism fits the model.

    Raises:
        UserError: one does not.
    """
    check_tensor_parallel(model_config, config.distributed.tp_size)
    plan = make_plan(config, model_config)
    check_context_parallel(model_config, config.distributed)
    return plan
