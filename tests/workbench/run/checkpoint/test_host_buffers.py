"""Snapshots of tensors in host memory: buffers that are used again, and copies from a GPU that wait once."""

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.run.checkpoint.host_buffers import HostBuffers

SHAPES = [((3, 4), torch.bfloat16), ((5,), torch.float32), ((5, 2), torch.float64)]


def random_tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in SHAPES]


def test_snapshot_of_transposed_tensors_equals_them() -> None:
    tensors = [tensor.T for tensor in random_tensors(1)[::2]]
    assert all(copy.equal(tensor) for copy, tensor in zip(HostBuffers().snapshot(tensors), tensors, strict=True))


def test_snapshot_of_other_dtypes_has_these_dtypes() -> None:
    buffers = HostBuffers()
    tensors = random_tensors(1)
    buffers.snapshot(tensors)
    copies = buffers.snapshot([tensor.double() for tensor in tensors])
    assert all(
        copy.equal(tensor.double()) and copy.dtype == torch.double for copy, tensor in zip(copies, tensors, strict=True)
    )


class Recorder(TorchDispatchMode):
    """Records allocations and copies as tuples. The first `pinnable` allocations of pinned memory succeed."""

    def __init__(self, pinnable: int = 1000) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.pinnable = pinnable

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.empty.memory_format:
            pinned = kwargs.get("pin_memory", False)
            self.calls.append(("pinned" if pinned else "pageable",))
            if pinned:
                self.pinnable -= 1
                if self.pinnable < 0:
                    raise RuntimeError("CUDA error: out of memory\nMore lines of advice")
        elif function is torch.ops.aten.copy_.default:
            target, source, *non_blocking = args
            self.calls.append(("copy", source.device.type, target.device.type, *non_blocking))
        return function(*args, **kwargs)


@pytest.fixture
def fake_gpu() -> Iterator[tuple[list[Tensor], mock.Mock]]:
    """Fake tensors on a GPU, which have no memory, and a substitute for its current stream."""
    mode = FakeTensorMode()
    tensors: list[Tensor] = [
        FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda", 0))
        for shape, dtype in SHAPES
    ]
    with mode, mock.patch("torch.cuda.current_stream") as current_stream:
        yield tensors, current_stream.return_value


def test_tensors_on_a_gpu_are_copied_to_pinned_memory_with_one_wait(fake_gpu: Any) -> None:
    tensors, stream = fake_gpu
    buffers, copies = HostBuffers(), [("copy", "cuda", "cpu", True)] * len(SHAPES)
    with Recorder() as recorder:
        stream.synchronize.side_effect = lambda: recorder.calls.append(("wait",))
        first = list(buffers.snapshot(tensors))
        assert recorder.calls == [("pinned",)] * len(SHAPES) + [*copies, ("wait",)]
        recorder.calls.clear()
        second = buffers.snapshot(tensors)
        assert recorder.calls == [*copies, ("wait",)]
    assert all(tensor is buffer for tensor, buffer in zip(first, second, strict=True))


def test_pageable_memory_replaces_memory_that_cannot_be_pinned_with_one_warning(
    fake_gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, stream = fake_gpu
    buffers = HostBuffers()
    with Recorder(pinnable=1) as recorder, caplog.at_level(logging.WARNING, "picotron"):
        buffers.snapshot(tensors)
        buffers.snapshot(tensors)
    # The second tensor is tried in vain; the third is not tried.
    assert [call for (call, *rest) in recorder.calls if not rest] == ["pinned", "pinned", "pageable", "pageable"]
    assert recorder.calls.count(("copy", "cuda", "cpu", True)) == 2 * len(SHAPES)
    assert stream.synchronize.call_count == 2
    (message,) = caplog.messages
    assert message.startswith("host memory for checkpoints cannot be pinned (CUDA error: out of memory);")
