"""Messages through the host's memory, so that ranks which share a GPU can run pipelines and rings.

gloo runs collectives on tensors of GPUs, but has no messages from GPU to GPU. NCCL has them, but refuses two ranks on
one GPU. So a message goes to the host, through gloo, and back to the GPU.
"""

import torch
import torch.distributed as dist


class StagedMessage:
    """A handle as torch's: `wait` returns when the tensor has arrived, or may change again."""

    def __init__(self, message: dist.P2POp) -> None:
        if message.op is dist.isend:
            self.host, self.target = message.tensor.detach().to("cpu", copy=True), None  # waits for the GPU
        else:
            self.host, self.target = torch.empty_like(message.tensor, device="cpu"), message.tensor
        self.work = message.op(self.host, message.peer, message.group)

    def wait(self) -> None:
        self.work.wait()
        if self.target is not None:
            with torch.no_grad():
                self.target.copy_(self.host)


def batch_isend_irecv(messages: list[dist.P2POp]) -> list[StagedMessage]:
    """Stand in for `torch.distributed.batch_isend_irecv`."""
    return [StagedMessage(message) for message in messages]
