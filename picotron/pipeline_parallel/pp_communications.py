"""Messages between neighbouring pipeline stages: activations travel forward, their gradients backward.

            recv_forward                  send_forward
    previous ----------->   this stage   -----------> next
             <-----------                <-----------
            send_backward                 recv_backward

At the ends of the pipeline, where a neighbour is missing, these operations do nothing.

All messages go through `batch_isend_irecv`. (NCCL uses separate communicators for single messages and for batches, so a
receiver on one would wait forever for a sender on the other.)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm


def _exchange(
    operations: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    tensor: Tensor | None,
    shape: Any,
) -> Tensor | None:
    """Send `tensor`, receive a tensor of `shape`, or both in one batch, and wait. Returns what was received.

    One group serves both directions, because a rank waits for each batch before it starts the next one.
    """
    grid = pgm.process_group_manager
    peers = {
        "recv_forward": grid.pp_prev_rank,
        "send_forward": grid.pp_next_rank,
        "recv_backward": grid.pp_next_rank,
        "send_backward": grid.pp_prev_rank,
    }
    if peers[operations[0]] is None:  # at an end of the pipeline
        return None
    messages = {
        name: checked(tensor, device, dtype)
        if name.startswith("send")
        else torch.empty(shape, dtype=dtype, device=device)
        for name in operations
    }
    start: Any = {"send": dist.isend, "recv": dist.irecv}
    batch = [dist.P2POp(start[name[:4]], message, peers[name], grid.pp_group) for name, message in messages.items()]
    for handle in dist.batch_isend_irecv(batch):
        handle.wait()
    if "recv_forward" in messages:  # activations, whose gradient is to be sent back
        messages["recv_forward"].requires_grad_(torch.is_grad_enabled())
    return next((message for name, message in messages.items() if name.startswith("recv")), None)


def checked(tensor: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor to send. Raises ValueError if the receiver expects another one, and would wait for ever."""
    if tensor is None or (tensor.device.type, tensor.dtype) != (device.type, dtype):
        found = "nothing" if tensor is None else f"{tensor.dtype} on {tensor.device}"
        raise ValueError(
            f"pp rank {pgm.process_group_manager.pp_rank} cannot send {found}: the receiver expects {dtype} on {device}"
        )
    return tensor.detach().contiguous()


def pipeline_communicate(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    tensor: Tensor | None = None,
    shapes: Sequence[int] | None = None,
) -> Tensor | None:
    """Send or receive one message, and wait for it.

    Args:
        operation: `recv_forward`, `send_forward`, `recv_backward` or `send_backward`.
        device, dtype: those of the message.
        tensor: tensor to send.
        shapes: shape of the message to receive.

    Returns:
        The received tensor, else None. If gradients are enabled, received activations require one, to be sent back.

    Raises:
        ValueError: `tensor` is on another device or has another dtype than the receiver expects.
    """
    return _exchange([operation], device, dtype, tensor, shapes)


def bidirectional_pipeline_communicate(
    operation: str,
    send_tensor: Tensor | None,
    recv_shapes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """Send to a neighbour and receive from the same neighbour: `send_fwd_recv_bwd` or `send_bwd_recv_fwd`.

    Both messages are in one batch: if each neighbour first sent and then received, both would wait forever for the
    other to receive.

    Args:
        send_tensor: tensor to send.
        recv_shapes: shape of the message to receive.
        device, dtype: those of both messages.

    Returns:
        The received tensor, as from `pipeline_communicate`.

    Raises:
        ValueError: as `pipeline_communicate`.
    """
    operations = {
        "send_fwd_recv_bwd": ("send_forward", "recv_backward"),
        "send_bwd_recv_fwd": ("send_backward", "recv_forward"),
    }[operation]
    return _exchange(operations, device, dtype, send_tensor, recv_shapes)
