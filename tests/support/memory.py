"""Bytes that tensors take, in tests."""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
