"""Step 1, one process: micro-batches add up their gradients, and AdamW updates the weights.

python -m steps.s1_one_process
"""

import torch
from torch import Tensor, nn

from steps import llama


def train_step(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add up the gradients of all (ids, targets), (B, T) each. Returns their part of the loss."""
    total = torch.zeros((), dtype=llama.DTYPE)
    for ids, targets in micro_batches:
        loss = llama.loss_fn(model(ids), targets)
        loss.backward()
        total += loss.detach()
    return total


def train() -> tuple[nn.Module, list[float]]:
    """Train. Returns the model and the loss of each step."""
    model = llama.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    losses = []
    for batch in llama.make_batches():
        rows = batch.view(llama.MICRO_BATCHES, -1, llama.LENGTH + 1)  # (micro-batch, B, T + 1)
        loss = train_step(model, list(zip(rows[..., :-1], rows[..., 1:], strict=True)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    llama.print_losses(train()[1])
