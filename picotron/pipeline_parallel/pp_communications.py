"""Messages between neighbouring pipeline stages: activations go forward, their gradients come back.

            recv_forward                  send_forward
    previous ----------->   this stage   -----------> next
             <-----------                <-----------
            send_backward                 recv_backward

Where there is no neighbour, nothing happens: the first stage receives no activations, the last one no gradients.

All messages go through `batch_isend_irecv`, on the pp group. (NCCL has a communicator for single messages and another
one for batches; a receiver on one would wait for ever for a sender on the other.)
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron import process_group_manager as pgm


def _peer(operation: str) -> int | None:
    """The global rank of the stage at the other end, or None."""
    grid = pgm.process_group_manager
    return {
        "recv_forward": grid.pp_prev_rank,
        "send_forward": grid.pp_next_rank,
        "recv_backward": grid.pp_next_rank,
        "send_backward": grid.pp_prev_rank,
    }[operation]


def check_message(tensor: Tensor, shapes: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    """The other stage cannot see what is coming. It waits for what was announced, and that is what it must get."""
    if (tuple(tensor.shape), tensor.device.type, tensor.dtype) != (tuple(shapes), device.type, dtype):
        raise ValueError(
            f"stage {pgm.process_group_manager.pp_rank} wants to send {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
            f"but {dtype} {list(shapes)} on {device} was announced"
        )


def start_message(operation: str, tensor: Tensor, rank: int) -> list[dist.Work]:
    """Begin to send or to receive (`send`, `recv`); what is returned can wait for the end.

    Args:
        rank: of the pipeline, at the other end.
    """
    grid, kinds = pgm.process_group_manager, {"send": dist.isend, "recv": dist.irecv}
    return dist.batch_isend_irecv([dist.P2POp(kinds[operation], tensor, grid.pp_group_ids[rank], grid.pp_group)])


def _exchange(messages: list[tuple[str, Tensor]]) -> None:
    """Run (operation, tensor) pairs at the same time and wait for all."""
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
    """One message: `recv_forward`, `send_forward`, `recv_backward` or `send_backward`.

    Args:
        operation: what this stage does.
        device, dtype: of the message.
        tensor: what to send.
        shapes: the shape to receive; if given for a send, what `tensor` must have.

    Returns:
        What was received. Activations require a gradient, if gradients are enabled: it is what goes back.

    Raises:
        ValueError: `tensor` is not what was announced.
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
    operation: str, send_tensor: Tensor | None, recv_shapes: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Send to a neighbour and receive from the same one: `send_fwd_recv_bwd` or `send_bwd_recv_fwd`.

    It has to be one batch: if both neighbours first sent and then received, each would wait for the other to receive.

    Args:
        send_tensor: it has the shape `recv_shapes` too, since a gradient has the shape of its activation.
        recv_shapes, device, dtype: of the message to receive.

    Returns:
        What was received, as `pipeline_communicate` does.

    Raises:
        ValueError: `send_tensor` is not what was announced.
    """
    send, receive = {
        "send_fwd_recv_bwd": ("send_forward", "recv_backward"),
        "send_bwd_recv_fwd": ("send_backward", "recv_forward"),
    }[operation]
    if _peer(send) is None:
        return None
    assert send_tensor is not None
    check_message(send_tensor, recv_shapes, device, dtype)
    received = torch.empty(recv_shapes, dtype=dtype, device=device)
    _exchange([(send, send_tensor.contiguous()), (receive, received)])
    return received.requires_grad_(receive == "recv_forward")
