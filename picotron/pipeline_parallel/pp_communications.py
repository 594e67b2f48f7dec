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


def check_message(tensor: Tensor, shapes: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if `tensor` does not fit into the buffer that the receiver has allocated for it."""
    if (tuple(tensor.shape), tensor.device.type, tensor.dtype) != (tuple(shapes), device.type, dtype):
        raise ValueError(
            f"pp rank {pgm.process_group_manager.pp_rank} cannot send {tensor.dtype} {list(tensor.shape)} on {tensor.device}: "
            f"the receiver expects {dtype} {list(shapes)} on {device}; change the stage's output, or `receives`"
        )


def start_message(operation: str, tensors: Sequence[Tensor], rank: int) -> list[dist.Work]:
    """Start to send tensors, or to receive into them, in one batch. Returns the handles to wait for.

    Messages to lower pp ranks have a separate group. NCCL runs the operations of a group one after the other, so in a
    single group, a message that waits for its peer would also delay this rank's later messages in the other direction.

    Args:
        operation: "send" or "recv".
        rank: pp rank at the other end.
    """
    grid, kinds = pgm.process_group_manager, {"send": dist.isend, "recv": dist.irecv}
    sender, receiver = (grid.pp_rank, rank) if operation == "send" else (rank, grid.pp_rank)
    group = grid.pp_group if sender < receiver else grid.pp_reverse_group
    batch = [dist.P2POp(kinds[operation], tensor, grid.pp_group_ids[rank], group) for tensor in tensors]
    return dist.batch_isend_irecv(batch) if batch else []


def _exchange(messages: list[tuple[str, Tensor]]) -> None:
    """Start all messages, given as (operation, tensor), in one batch, and wait for them.

    One group serves both directions, because a rank waits for each batch before it starts the next one.
    """
    group = pgm.process_group_manager.pp_group
    kinds = {"send": dist.isend, "recv": dist.irecv}
    batch = [
        dist.P2POp(kinds[operation[:4]], tensor.detach(), _peer(operation), group) for operation, tensor in messages
    ]
    for handle in dist.batch_isend_irecv(batch):
        handle.wait()


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
        shapes: shape of the message: required to receive; to send, by default that of `tensor`.

    Returns:
        The received tensor, else None. If gradients are enabled, received activations require one, to be sent back.

    Raises:
        ValueError: `tensor` does not have this device, dtype and shape.
    """
    if _peer(operation) is None:
        return None
    if operation.startswith("recv"):
        assert shapes is not None
        received = torch.empty(shapes, dtype=dtype, device=device)
        _exchange([(operation, received)])
        return received.requires_grad_(operation == "recv_forward" and torch.is_grad_enabled())
    assert tensor is not None
    check_message(tensor, tensor.shape if shapes is None else shapes, device, dtype)
    _exchange([(operation, tensor.contiguous())])
    return None


def bidirectional_pipeline_communicate(
    operation: str,
    send_tensor: Tensor | None,
    recv_shapes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    send_shapes: Sequence[int] | None = None,
) -> Tensor | None:
    """Send to a neighbour and receive from the same neighbour: `send_fwd_recv_bwd` or `send_bwd_recv_fwd`.

    Both messages are in one batch: if each neighbour first sent and then received, both would wait forever for the
    other to receive.

    Args:
        send_tensor: tensor to send.
        recv_shapes, send_shapes: shapes of the two messages, by default the same; micro-batches may differ.
        device, dtype: those of both messages.

    Returns:
        The received tensor, as from `pipeline_communicate`.

    Raises:
        ValueError: `send_tensor` does not have this device, dtype and shape.
    """
    send, receive = {
        "send_fwd_recv_bwd": ("send_forward", "recv_backward"),
        "send_bwd_recv_fwd": ("send_backward", "recv_forward"),
    }[operation]
    if _peer(send) is None:
        return None
    assert send_tensor is not None
    check_message(send_tensor, recv_shapes if send_shapes is None else send_shapes, device, dtype)
    received = torch.empty(recv_shapes, dtype=dtype, device=device)
    _exchange([(send, send_tensor.contiguous()), (receive, received)])
    return received.requires_grad_(receive == "recv_forward")
