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

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm


def _peer(operation: str) -> int | None:
    """Return the global rank of the neighbour at the other end, or None if there is no such neighbour."""
    grid = pgm.process_group_manager
    return {
        "recv_forward": grid.pp_prev_rank,
        "send_forward": grid.pp_next_rank,
        "recv_backward": grid.pp_next_rank,
        "send_backward": grid.pp_prev_rank,
    }[operation]


def _exchange(messages: list[tuple[str, Tensor]]) -> None:
    """Start all messages, given as (operation, tensor), in one batch, and wait for them.

    One group serves both directions, because a rank waits for each batch before it starts the next one.
    """
    group = pgm.process_group_manager.pp_group
    batch = []
    for operation, tensor in messages:
        start = dist.isend if operation.startswith("send") else dist.irecv
        batch.append(dist.P2POp(start, tensor.detach(), _peer(operation), group))
    for handle in dist.batch_isend_irecv(batch):
        handle.wait()


def checked(tensor: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor to send. Raises ValueError if the receiver expects another one, and would wait for ever."""
    if tensor is None or (tensor.device.type, tensor.dtype) != (device.type, dtype):
        found = "nothing" if tensor is None else f"{tensor.dtype} on {tensor.device}"
        raise ValueError(
            f"pp rank {pgm.process_group_manager.pp_rank} cannot send {found}: the receiver expects {dtype} on {device}"
        )
    return tensor.contiguous()


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
    if _peer(operation) is None:
        return None
    if operation.startswith("recv"):
        assert shapes is not None
        received = torch.empty(shapes, dtype=dtype, device=device)
        _exchange([(operation, received)])
        return received.requires_grad_(operation == "recv_forward" and torch.is_grad_enabled())
    _exchange([(operation, checked(tensor, device, dtype))])
    return None


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
    send, receive = {
        "send_fwd_recv_bwd": ("send_forward", "recv_backward"),
        "send_bwd_recv_fwd": ("send_backward", "recv_forward"),
    }[operation]
    if _peer(send) is None:
        return None
    received = torch.empty(recv_shapes, dtype=dtype, device=device)
    _exchange([(send, checked(send_tensor, device, dtype)), (receive, received)])
    return received.requires_grad_(receive == "recv_forward")
