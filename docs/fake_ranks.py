"""Be any rank of any layout, on one process: torch's fake process group does a message at once, and changes nothing.

What is computed is nonsense then. How much of it is sent and kept, and who holds what, is not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from picotron.config import Config
from picotron.config_reader import load_config
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.model import load_model_config
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, hidden_states_shape
from picotron.pipeline_parallel.plan import make_plan
from picotron.process_group_manager import setup_process_group_manager
from train import build_model, pick_train_step

CPU = torch.device("cpu")
# As torch calls a message, as the field does, and what a rank sends of a whole tensor in a ring of n ranks.
MESSAGES: dict[str, tuple[str, Callable[[int], float]]] = {
    "allreduce_": ("all-reduce", lambda n: 2 * (n - 1) / n),
    "_allgather_base_": ("all-gather", lambda n: (n - 1) / n),
    "_reduce_scatter_base_": ("reduce-scatter", lambda n: (n - 1) / n),
    "alltoall_base_": ("all-to-all", lambda n: (n - 1) / n),
    "send": ("send", lambda n: 1),
}


class Traffic(TorchDispatchMode):
    """Counts what this rank sends while the mode is on: messages, and their bytes, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, float] = defaultdict(float)

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and function.overloadpacket.__name__ in MESSAGES:
            kind, share = MESSAGES[function.overloadpacket.__name__]
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            whole = max(tensor.nbytes for tensor in tree_leaves(args[:2]) if isinstance(tensor, Tensor))
            self.messages[kind] += 1
            self.bytes[kind] += share(group.size()) * whole
        return function(*args, **(kwargs or {}))


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


def step_of(config: Config, wrap: Callable[..., DataParallel] = DataParallelBucket) -> Callable[[], Any]:
    """What this rank does in a training step, ready to be called; without the optimizer."""
    stage = stage_of(config)
    model = wrap(stage, groups=stage.parameters_by_stage())
    tokens = np.zeros(config.training.seq_length * config.global_batch_size + 1, np.uint16)
    loader = MicroBatchDataLoader(tokens, config, CPU)
    model_config = load_model_config(config.model)
    plan, shape = make_plan(config, model_config), hidden_states_shape(config, model_config)
    take_step = pick_train_step(config, plan, shape, CPU, torch.float32)
    return lambda: take_step(model, loader)


def traffic_of(config: Config, rank: int = 0, wrap: Callable[..., DataParallel] = DataParallelBucket) -> Traffic:
    """What a rank sends in a step, without the few numbers of logging and clipping."""
    with fake_rank(rank, config):
        step = step_of(config, wrap)
        with Traffic() as traffic:
            step()
    return traffic
