"""Peak memory of a training step on a fake GPU: bytes of the tensors that exist at the same time."""

import weakref
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from benchmarks.gpu.fake_cuda import fake_cuda_rank
from picotron.config import Config
from picotron.optimizer.optimizer import clip_grad_norm
from workbench.explain.memory import rank_memory, sizes

BLOCK = 512  # torch's allocator rounds the size of a tensor up to a multiple of it


RESIZE = torch.UntypedStorage.resize_


def rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


class PeakMemory(TorchDispatchMode):
    """Counter of the bytes on the GPU. A storage counts from the operation that returns it until nobody refers to it.

    A change of the size of a storage counts, too, because ZeRO-3 frees the storage of weights and allocates it again.
    Memory inside of an operation, such as the workspace of a matrix product, is not seen.

    Attributes:
        current: bytes that exist now.
        peak: maximum of `current`; may be set to 0 to measure a later phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # by address of the storage
        self.current = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = size = rounded(storage.nbytes())
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self.remove, storage._cdata)

    def remove(self, address: int) -> None:
        self.current -= self.sizes.pop(address)

    def resize(self, storage: Any, size: int) -> None:
        RESIZE(storage, size)
        if storage._cdata in self.sizes:
            self.current += rounded(size) - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = rounded(size)
            self.peak = max(self.peak, self.current)


def measure(config: Config, model_config: LlamaConfig, rank: int) -> dict[str, int]:
    """Measure the bytes of a rank, and compute those of `estimate.py`."""
    memory = PeakMemory()
    resize = mock.patch.object(torch.UntypedStorage, "resize_", lambda storage, size: memory.resize(storage, size))
    with resize, fake_cuda_rank(config, model_config, rank, observer=memory) as run:
        run.optimizer.step()  # allocates its state, as the first step does
        state, memory.peak = memory.current, 0
        run.train_step(run.model, run.data_loader)
        clip_grad_norm(run.model, config.training.max_grad_norm)
        run.optimizer.step()
    layout, s = config.distributed, sizes(config, model_config)
    estimate = rank_memory(config, model_config, run.plan)[rank // (layout.cp_size * layout.tp_size) % layout.pp_size]
    return {
        "rank": rank,
        "state": state,
        "peak": memory.peak,
        "estimated_state": estimate.state,
        "estimated_peak": estimate.total,
        "message": (layout.pp_size > 1) * s.tokens * s.shard * s.number,
    }
