"""Snapshots of tensors in host memory, for checkpoints that are written while training continues."""

import logging

import torch
from torch import Tensor

from picotron.console import first_line

logger = logging.getLogger("picotron")


class HostBuffers:
    """Buffers in host memory that the first snapshot allocates and every later snapshot overwrites.

    Buffers for tensors on a GPU are page-locked (pinned): the operating system never moves them, so the GPU writes to
    them directly, and all copies are queued without waiting. A copy to pageable memory goes through a small pinned
    buffer of the driver and blocks the CPU until it is complete. The buffers are kept, because pinning is slow, and
    because each page of new memory costs a page fault.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.pin = True

    def snapshot(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to host memory.

        Args:
            tensors: tensors with the same shapes, dtypes and devices at every call.

        Returns:
            The copies, which are valid until the next call.
        """
        if not self.buffers:
            self.buffers = [self._allocate(tensor) for tensor in tensors]
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
            buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()  # the only wait, for all copies
        return self.buffers

    def _allocate(self, tensor: Tensor) -> Tensor:
        # One buffer per tensor, because PyTorch rounds the size of pinned memory up to a power of two.
        if tensor.is_cuda and self.pin:
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError as error:
                self.pin = False
                logger.warning(
                    "host memory for checkpoints cannot be pinned (%s); copies to pageable memory take longer. Free some "
                    "host memory to avoid this",
                    first_line(error),
                )
        return torch.empty(tensor.shape, dtype=tensor.dtype)
