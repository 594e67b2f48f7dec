"""A pipeline stage of transformers' Llama, whose parameters keep their names."""

from typing import Any

import torch
from torch import Tensor, nn


class Stage(nn.Module):
    """Some layers of a model; the first stage also has the embedding, the last one the norm and the head."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.model: Any
        self.lm_head: Any
        self.rotary_emb: Any
        layers = len(model.model.layers) // stages
        self.model, self.lm_head = nn.Module(), model.lm_head if stage == stages - 1 else None
        kept = [str(i) for i in range(stage * layers, (stage + 1) * layers)]
        self.model.layers = nn.ModuleDict({i: model.model.layers[int(i)] for i in kept})
        self.model.embed_tokens = model.model.embed_tokens if stage == 0 else None
        self.model.norm = model.model.norm if stage == stages - 1 else None
        self.rotary_emb = model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.model.embed_tokens is None else self.model.embed_tokens(x)
        rotation = self.rotary_emb(x, torch.arange(x.size(1))[None])
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rotation)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))
