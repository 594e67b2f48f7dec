"""Solution of puzzle 15."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzles.group import Group


def step(w: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    padding = (0, -len(w) % group.size)
    if not state:
        own = torch.nn.Parameter(F.pad(w, padding).chunk(group.size)[group.rank].clone())
        state["own"], state["optimizer"] = own, torch.optim.AdamW([own], lr=0.1, weight_decay=0.1)
    state["own"].grad = group.reduce_scatter(F.pad(gradient, padding)) / group.size
    state["optimizer"].step()
    return group.all_gather(state["own"].detach())[: len(w)]
