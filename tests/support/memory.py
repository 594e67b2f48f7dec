"""Bytes that tensors take, in tests."""

from collections import Counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """Counter of the bytes that autograd saves for backward. Each storage counts once, with the bytes it has when the
    next tensor is saved or read: selective recomputation empties storages.

    Args:
        model: module whose weights do not count. (ZeRO-3 replaces them by gathered ones while modules run.)

    Attributes:
        current: bytes saved now.
        peak: maximum of `current`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.uses: Counter[int] = Counter()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.peak = 0

    @property
    def current(self) -> int:
        return sum(self.storages[key].nbytes() for key, uses in self.uses.items() if uses)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        self.peak = max(self.peak, self.current)
        storage = tensor.untyped_storage()
        weights = (weight for module in self.model.modules() for weight in module._parameters.values())
        if any(storage._cdata == w.untyped_storage()._cdata for w in weights if w is not None) or storage.nbytes() == 0:
            return tensor
        return SavedTensor(self, tensor)

    def unpack(self, saved: Any) -> Tensor:
        self.peak = max(self.peak, self.current)
        return saved.tensor if isinstance(saved, SavedTensor) else saved


class SavedTensor:
    """A tensor that counts from now until autograd releases it."""

    def __init__(self, counter: SavedBytes, tensor: Tensor) -> None:
        self.counter, self.tensor, storage = counter, tensor, tensor.untyped_storage()
        self.key = storage._cdata
        counter.storages[self.key] = storage
        counter.uses[self.key] += 1

    def __del__(self) -> None:
        self.counter.uses[self.key] -= 1
        if self.counter.uses[self.key] == 0:
            del self.counter.storages[self.key], self.counter.uses[self.key]


class LiveBytes(TorchDispatchMode):
    """Counter of the peak of all tensors that operations create.

    Args:
        held: tensors that do not count, even if operations return views of them.
    """

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.held = {tensor.untyped_storage()._cdata for tensor in held}
        self.storages = WeakValueDictionary[int, torch.UntypedStorage]()
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.held:
                self.storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))
        return results
