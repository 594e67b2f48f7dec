"""Snapshots of tensors in host memory: buffers that are used again, and copies from a GPU that wait once."""

from typing import Any
from unittest import mock

import pytest
import torch

from workbench.run.checkpoint.host_buffers import HostBuffers


@pytest.mark.parametrize(
    ("pinnable", "allocations"),
    [
        (3, ["pinned", "pinned", "pinned"]),
        (1, ["pinned", "pinned", "pageable", "pageable"]),  # the second is tried in vain, the third is not tried
    ],
)
def test_tensors_on_a_gpu_are_copied_to_pinned_memory_with_one_wait(
    caplog: pytest.LogCaptureFixture, pinnable: int, allocations: list[str]
) -> None:
    """The GPU and the memory are stand-ins, which note what is asked of them."""
    tensors = [mock.Mock(shape=(size,), dtype=torch.float32, is_cuda=True) for size in range(3)]
    calls = []

    def empty(shape: Any, dtype: Any, pin_memory: bool = False) -> Any:
        calls.append("pinned" if pin_memory else "pageable")
        if pin_memory and calls.count("pinned") > pinnable:
            raise RuntimeError("CUDA error: out of memory\nMore lines of advice")
        buffer = mock.Mock(shape=shape, dtype=dtype)
        buffer.copy_ = lambda tensor, non_blocking: calls.append((tensor, non_blocking))
        return buffer

    buffers = HostBuffers()
    with mock.patch.object(torch, "empty", empty), mock.patch("torch.cuda.current_stream") as stream:
        stream.return_value.synchronize = lambda: calls.append("wait")
        first, second = list(buffers.snapshot(tensors)), buffers.snapshot(tensors)
    assert first == second
    assert calls == [*allocations, *[*((tensor, True) for tensor in tensors), "wait"] * 2]
    messages = [message.partition(";")[0] for message in caplog.messages]
    warning = "host memory for checkpoints cannot be pinned (CUDA error: out of memory)"
    assert messages == ([warning] if pinnable == 1 else [])
