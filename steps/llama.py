"""Tiny Llama and its data, which all steps use unchanged: the model contains no parallelism.

Steps replace attributes of a layer: `enter`, `leave`, `attend`, `positions` and `mlp`. Local sizes
come from the shapes of the weights, so a layer that holds half of the heads runs the same code.

In shapes, B is the number of sequences of a micro-batch, T of tokens, H of query and K of key/value
heads; D is the hidden size, d the head size, F the intermediate size and V the vocabulary size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = "0123456789+=\n"
HIDDEN, INTERMEDIATE, LAYERS = 64, 160, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 8
BATCH, MICRO_BATCHES, LENGTH = 16, 4, 32  # sequences of a step; micro-batches; tokens of a sequence
STEPS, LEARNING_RATE = 10, 1e-2
DTYPE = torch.float64  # so that layouts, which add in different orders, agree to many digits


def identity(x: Tensor) -> Tensor:
    """Return x."""
    return x


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the tokens up to each: q (B, H, T, d), k and v (B, K, T, d) -> (B, H, T, d)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) by an angle that grows with the position, in float32 like
    transformers: x (B, T, heads, d), positions (T,). Su et al. 2021, arXiv:2104.09864.
    """
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = positions[:, None, None].float() * frequencies  # (T, 1, d/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLP(nn.Module):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202): (..., D) -> (..., D)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP: (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter: Callable[[Tensor], Tensor] = identity  # before the first matrices of a block
        self.leave: Callable[[Tensor], Tensor] = identity  # after the last one
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.positions = torch.arange(LENGTH)
        self.input_layernorm = nn.RMSNorm(HIDDEN, 1e-6)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, 1e-6)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.mlp: nn.Module = MLP()

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.input_layernorm(x))
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (proj(y).unflatten(-1, (-1, HEAD_DIM)) for proj in projections)
        q, k = rotate(q, self.positions), rotate(k, self.positions)  # (B, T, H, d), (B, T, K, d)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (B, H, T, d)
        x = x + self.leave(self.o_proj(y.transpose(1, 2).flatten(2)))
        return x + self.leave(self.mlp(self.enter(self.post_attention_layernorm(x))))


def make_model() -> nn.Sequential:
    """Make the same model in every process: token ids (B, T) -> logits (B, T, V)."""
    torch.manual_seed(0)
    embed_tokens, norm = nn.Embedding(len(VOCABULARY), HIDDEN), nn.RMSNorm(HIDDEN, 1e-6)
    layers = [DecoderLayer() for _ in range(LAYERS)]
    lm_head = nn.Linear(HIDDEN, len(VOCABULARY), bias=False)
    return nn.Sequential(embed_tokens, *layers, norm, lm_head).to(DTYPE)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute these tokens' part of the mean loss of a batch: the parts of all ranks are summed."""
    return F.cross_entropy(logits.mT, targets, reduction="sum") / (BATCH * LENGTH)  # (B, V, T)


def make_batches() -> Tensor:
    """Draw token ids from a list of sums: (STEPS, BATCH, LENGTH + 1)."""
    text = "".join(f"{a}+{b}={a + b}\n" for a in range(10) for b in range(10))
    tokens = torch.tensor([VOCABULARY.index(character) for character in text])
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(tokens) - LENGTH, (STEPS, BATCH), generator=generator)
    return tokens.unfold(0, LENGTH + 1, 1)[starts]


def print_losses(losses: list[float]) -> None:
    """Print a line for each step."""
    for step, loss in enumerate(losses, start=1):
        print(f"step {step:2} | loss {loss:.9f}")
