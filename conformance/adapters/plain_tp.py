"""Tensor and sequence parallelism in plain torch, as in Megatron-LM: activations are (T, B, D), between the blocks each
rank has some of the tokens, and one matrix computes queries, keys and values, another both halves of the MLP.

Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from conformance import Case, Part, Result
from conformance.adapters.loop import accumulate, chunks, sum_norms, train
from conformance.case import Batch
from conformance.examples.tensor import Pair

AXES = ("tp",)
CHAPTERS = ("step", "run", "loss", "float32")
LACKS = ("documents", "evaluation", "resume")
NAMES = {"embedding": ("model.embed_tokens",), "final_norm": ("model.norm",), "output": ("lm_head",)}
NAMES_IN_LAYERS = {  # transformers' modules that a module of a layer computes
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "proj": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def all_gather(x: Tensor) -> Tensor:
    """Join the tokens of all ranks: (T/tp, B, D) -> (T, B, D)."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x.contiguous())
    return torch.cat(shards)


def reduce_scatter(x: Tensor) -> Tensor:
    """Sum over the ranks, of which each keeps its tokens: (T, B, D) -> (T/tp, B, D)."""
    shards = list(x.contiguous().chunk(dist.get_world_size()))
    own = torch.empty_like(shards[0])
    dist.reduce_scatter(own, shards)
    return own


def shard(weight: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's rows (0) or columns (1) of a matrix."""
    return weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


class Columns(nn.Module):
    """This rank's outputs of several matrices: x (T/tp, B, D) -> y (T, B, outputs/tp)."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([shard(linear.weight) for linear in linears]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Pair.apply(x, all_gather, reduce_scatter), self.weight)


class Rows(nn.Module):
    """A matrix of which this rank has some inputs: x (T, B, inputs/tp) -> y (T/tp, B, D)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard(linear.weight, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Pair.apply(F.linear(x, self.weight), reduce_scatter, all_gather)
        return y


class Layer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.proj = Columns(attention.q_proj, attention.k_proj, attention.v_proj), Rows(attention.o_proj)
        self.gate_up, self.down = Columns(mlp.gate_proj, mlp.up_proj), Rows(mlp.down_proj)
        self.head_dim = attention.head_dim
        self.sizes = [
            x.out_features // dist.get_world_size() for x in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.input_norm(x)).split(self.sizes, -1)  # (T, B, heads/tp * d) each
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for y in parts)  # (B, heads/tp, T, d)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """This rank's part of transformers' Llama: input_ids (B, T/tp) -> logits (B, T/tp, V)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.final_norm, self.output = model.model.embed_tokens, model.model.norm, model.lm_head
        self.layers = nn.ModuleList(Layer(each) for each in model.model.layers)
        self.rotary = [model.model.rotary_emb]  # in a list: it has no weights, and is no part of the model

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(0, 1)  # (T/tp, B, D)
        cos, sin = self.rotary[0](x, torch.arange(x.size(0) * dist.get_world_size())[None])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.output(self.final_norm(x).transpose(0, 1))
        return logits


def module_name(name: str) -> tuple[str, ...]:
    """Return the names of the modules of transformers that a module computes."""
    layer, _, part = name.rpartition(".")
    return NAMES.get(name) or tuple(f"model.{layer}.{each}" for each in NAMES_IN_LAYERS.get(part, ()))


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole: Any = case.model()
    case.require(whole.config.model_type == "llama", "the layers are those of a Llama")
    case.require(whole.config.num_key_value_heads % ranks == 0, "the ranks would share key/value heads")
    model = Model(whole)
    split = {m.weight for m in model.modules() if isinstance(m, (Columns, Rows))}
    copied = [p for p in model.parameters() if p not in split]

    def backward(batch: Batch, total: Tensor) -> float:
        own = chunks(batch, ranks, 1)[rank]  # (G, T) -> (G, T/tp)
        loss = accumulate(case, own, total, lambda piece: model(piece["input_ids"]))
        dist.all_reduce(loss)
        for p in copied:  # each rank has used it for its own tokens
            dist.all_reduce(p.grad)
        return float(loss)

    def parts(tensors: Any) -> dict[str, Part]:
        """Return the parts of transformers' matrices that this rank's tensors hold."""
        found = dict[str, Part]()
        for own, tensor in tensors.items():
            names = module_name(own.removesuffix(".weight"))
            dim = 1 if names[0].endswith(("o_proj", "down_proj")) else 0
            sizes = [whole.get_parameter(f"{name}.weight").size(0) // ranks for name in names]
            for name, part in zip(names, tensor.split(sizes) if len(names) > 1 else [tensor], strict=True):
                start = [0] * part.ndim
                start[dim] = rank * part.size(dim) if name.endswith("_proj") else 0
                found[f"{name}.weight"] = Part(part, tuple(start))
        return found

    clip = functools.partial(sum_norms, share=lambda p: 1.0 if p in split else 1 / ranks)
    result = train(case, dict(model.named_parameters()), backward, clip)
    result.gradients, result.weights = [parts(each) for each in result.gradients], parts(result.weights)
    return result
