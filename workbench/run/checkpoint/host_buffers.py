"""Snapshots of tensors in host memory, for checkpoints that are written while training continues."""

import logging

import torch
from torch import Tensor

from workbench.console import first_line

logger = logging.getLogger("picotron")


class HostBuffers:
    """Buffers in host memory that a snapshot allocates and every later snapshot of the same kind overwrites.

    Buffers for tensors on a GPU are page-locked (pinned): the operating system never moves them, so the GPU writes to
    them directly, and all copies are queued without waiting. A copy to pageable memory goes through a small pinned
    buffer of the driver and blocks the CPU until it is complete. The buffers are kept, because pinning is slow, and
    because each page of new memory costs a page fault.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.pin = True

    def snapshot(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to host memory. New buffers are allocated if the shapes or dtypes differ from those of the last
        call, as after the first step, before which there are no moments.

        Returns:
            The copies, which are valid until the next call.
        """
        if [(each.shape, each.dtype) for each in self.buffers] != [(each.shape, each.dtype) for each in tensors]:
            self.buffers = [self._allocate(tensor) for tensor in tensors]
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()  # the only wait, for all copies
        return self.buffers

    def _allocate(self, tensor: Tensor) -> Tensor:
        # One buffer per tensor, because PyTorch rounds the size of pinned memory up to a power of two: that could
        # double one buffer for all tensors, while the sizes of many matrices are powers of two.
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
