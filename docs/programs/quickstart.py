"""The quickstart's model in any layout, for the programs that count and draw.

They run in `fake_rank`: one process plays one rank of any layout, and receives nothing. So the values that it computes
are meaningless, but the sizes of the tensors that a rank holds and sends are correct.
"""

from typing import Any

import torch

from picotron.config import Config, Training
from picotron.model.placement import Shard, placement
from picotron.model.weights import initial_weights
from workbench.explain.fake_group import fake_rank
from workbench.pipelines.engine import plan_pipeline
from workbench.run.config_reader import load_config
from workbench.run.model_config import load_model_config
from workbench.variants.choose import build_stage

CPU = torch.device("cpu")


def quickstart(**changes: Any) -> Config:
    """Return the config template/base_config.json with all sizes of the layout set to 1, and with `changes`.

    Args:
        changes: keys of the sections `distributed` and `training`.
    """
    one_process = {"dp_size": 1, "pp_size": 1, "tp_size": 1}
    arguments = ["--config", "template/base_config.json"]
    for key, value in (one_process | changes).items():
        section = "training" if key in Training.model_fields else "distributed"
        arguments += [f"--{section}.{key}", str(value).lower()]
    return load_config(arguments)


def stage_of(config: Config) -> Any:
    """Build this rank's part of the model as train.py does, without the wrapper of data parallelism."""
    model = load_model_config(config.model)
    weights = initial_weights(model, config.training.seed)
    return build_stage(config, model, plan_pipeline(config, model).wrap, CPU, torch.float32, weights)


def layer_shards(tp: int) -> dict[str, tuple[torch.Size, list[Shard]]]:
    """Return the full shapes of a layer's matrices, and the shards of each tp rank."""
    config, found = quickstart(tp_size=tp), dict[str, tuple[torch.Size, list[Shard]]]()
    for rank in range(tp):
        with fake_rank(rank, config.distributed):
            for name, parameter in stage_of(config).module.model.layers["0"].named_parameters():
                if (shard := placement(parameter).shard) is not None:
                    shape = torch.Size(shard.full_shape(parameter.shape))
                    found.setdefault(name.split(".")[-2], (shape, []))[1].append(shard)
    return found
