"""The Llama model (Touvron et al. 2023, arXiv:2302.13971) and its relatives, see `families`, without parallelism.

Parameters have the names and shapes of transformers' models, so state dicts need no translation. Local sizes are read
from the weights' shapes, so a rank that holds half of the heads runs the same code.

In shapes, B is the number of sequences, T of tokens, H of query heads, K of key/value heads, and D is the hidden size,
d the head size, F the intermediate size, V the vocabulary size. On a rank, T, H, K, F and V can be those of a shard.
W' is the transpose of W.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from picotron.collectives import accumulation_dtype
from picotron.console import UserError
from picotron.model.cross_entropy import (
    ChunkLoss,
    VocabularyShard,
    chunk_loss,
    linear_cross_entropy,
)
from picotron.model.families import differences, head_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AttentionFn = Callable[..., Tensor]  # of q, k, v
LossFn = Callable[[Any, Tensor], Tensor]  # function of the head and its input


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention, softmax(q k' / sqrt(d)) v, with PyTorch's best fused kernel.

    q (B, H, T, d); k, v (B, K, T, d), where H is a multiple of K -> (B, H, T, d)
    """
    if q.is_cuda and q.dtype != torch.bfloat16:
        # Only flash kernels read shared k/v heads in place. The GPUs before Ampere, which need float16, have none.
        k, v = (heads.repeat_interleave(q.size(1) // heads.size(1), dim=1) for heads in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))


def rope(frequencies: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the rotary angles (Su et al. 2021, arXiv:2104.09864), in float32 like transformers.

    Args:
        frequencies: see `rope_frequencies`.
        position_ids: (B, T).

    Returns:
        cos and sin, (B, T, 1, d/2) each.
    """
    angles = position_ids[:, :, None, None].float() * frequencies
    return angles.cos(), angles.sin()


def rope_frequencies(config: "PreTrainedConfig") -> Tensor:
    """Compute the rotary angles of position 1, (d/2). The CPU does so, as in transformers: a GPU's `pow` could differ
    in the last bit of a frequency, and so at position 8,192 by 0.0005 in an angle.
    """
    parameters, head_dim = config.rope_parameters, head_size(config)
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies: Tensor = 1.0 / parameters["rope_theta"] ** (half / head_dim)
    if parameters["rope_type"] == "linear":  # position interpolation (Chen et al. 2023, arXiv:2306.15595)
        frequencies = frequencies / parameters["factor"]
    elif parameters["rope_type"] == "llama3":
        # Llama 3.1 (arXiv:2407.21783) divides by `factor` the frequencies that make fewer than `low` turns in the
        # original context, keeps those that make more than `high` turns, and interpolates in between.
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        wavelength = 2 * torch.pi / frequencies
        keep = (parameters["original_max_position_embeddings"] / wavelength - low) / (high - low)
        keep = keep.clamp(0, 1)
        frequencies = (1 - keep) * frequencies / parameters["factor"] + keep * frequencies
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) by its angle. x (B, T, heads, d); cos, sin (B, T, 1, d/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight) over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.empty(size)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset == 0:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        dtype = accumulation_dtype(x)  # in bfloat16, 1 + weight would lose most digits of a small weight
        return F.rms_norm(x.to(dtype), self.weight.shape, self.offset + self.weight.to(dtype), self.eps).to(x.dtype)


class HeadNorm(RMSNorm):
    """An `RMSNorm` of each head of size d, with the same weight (d) for all heads: (B, T, heads * d)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, len(self.weight)))).flatten(-2)


class Linear(nn.Linear):
    """`torch.nn.Linear` whose product x W' + b can be replaced, as by float8 and by a backward in two halves."""

    product: Callable[..., Tensor] = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class Projections(nn.Module):
    """Apply the linear layers at the beginning of a block to its input. (With tensor parallelism, see
    `ParallelProjections`.)
    """

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        return [linear(x) for linear in linears]


class Attention(nn.Module):
    """Causal self-attention with rotary positions; H query heads share K key/value heads (GQA, arXiv:2305.13245)."""

    def __init__(self, config: "PreTrainedConfig", layer: int = 0) -> None:
        super().__init__()
        differs, self.head_dim = differences(config), head_size(config)
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.project = Projections()
        self.q_proj = Linear(config.hidden_size, queries, differs.qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, differs.qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, differs.qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size, differs.o_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if differs.qk_norm == "head":
            self.q_norm = HeadNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = HeadNorm(self.head_dim, config.rms_norm_eps)
        elif differs.qk_norm == "all heads":
            self.q_norm = RMSNorm(queries, config.rms_norm_eps)
            self.k_norm = RMSNorm(keys, config.rms_norm_eps)
        self.rotates = layer not in differs.unrotated
        multiplier = differs.attention_multiplier  # of the scores, which `attend` divides by sqrt(d)
        self.query_scale = 1.0 if multiplier is None else multiplier * math.sqrt(self.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn = fused_attention) -> Tensor:
        q, k, v = self.project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k = self.q_norm(q), self.k_norm(k)
        # H and K depend on the weights: a tp rank has H/tp query heads and max(1, K/tp) key/value heads.
        q, k, v = [
            each.view(len(x), -1, each.size(-1) // self.head_dim, self.head_dim) for each in (q, k, v)
        ]  # (B, T, H, d)
        if self.rotates:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.query_scale != 1:
            q = q * self.query_scale
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, H, T, d), (B, K, T, d)
        y = attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the `hidden_act` of a config.json
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class GatedActivation(nn.Module):
    """activation(gate) * up, each (B, T, F)."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class MLP(nn.Module):
    """A gated linear unit (Shazeer 2020, arXiv:2002.05202): SwiGLU with `silu`, GEGLU with `gelu`."""

    def __init__(self, config: "PreTrainedConfig") -> None:
        super().__init__()
        bias = differences(config).mlp_bias
        self.act_fn = GatedActivation(ACTIVATIONS[config.hidden_act])
        self.project = Projections()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x, self.gate_proj, self.up_proj)  # (B, T, F) each
        return self.down_proj(self.act_fn(gate, up))


class DecoderLayer(nn.Module):
    def __init__(self, config: "PreTrainedConfig", layer: int = 0) -> None:
        super().__init__()
        offset = differences(config).norm_offset
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset)
        self.mlp = MLP(config)
        self.residual_multiplier = differences(config).residual_multiplier

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn = fused_attention) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), cos, sin, attend)
        x = torch.add(x, y, alpha=self.residual_multiplier)
        y = self.mlp(self.post_attention_layernorm(x))
        return torch.add(x, y, alpha=self.residual_multiplier)


class PostNormLayer(nn.Module):
    """A decoder layer that normalises the outputs of attention and MLP, instead of their inputs (OLMo 2)."""

    def __init__(self, config: "PreTrainedConfig", layer: int = 0) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn = fused_attention) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos, sin, attend))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Head(nn.Linear):
    """The linear layer that computes the logits of the next token, (B, T, D) -> (B, T, V), and losses without them.

    Attributes:
        vocabulary: the tokens of which this rank has rows of the weight.
        compute_chunk: `chunk_loss`, or the same compiled.
    """

    compute_chunk: ChunkLoss = staticmethod(chunk_loss)

    def __init__(self, hidden_size: int, vocab_size: int, **factory: Any) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, **factory)
        self.vocabulary = VocabularyShard(0, vocab_size)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of this rank's rows; here x itself. (Tensor parallelism has other rows on other ranks.)"""
        return x

    def local_logits(self, x: Tensor) -> Tensor:
        """Compute the logits of the tokens in `vocabulary`, (B, T, V/tp)."""
        return F.linear(self.enter(x), self.weight)[..., : self.vocabulary.rows]

    def cross_entropy(self, x: Tensor, target_ids: Tensor, target_weights: Tensor | None = None) -> Tensor:
        """Compute the mean loss of predicting target_ids (B, T) from x (B, T, D), or the sum of the losses times
        target_weights (B, T). Targets that are IGNORE_INDEX count in neither. A scalar in float32 or wider.

        The mean is over this rank's micro-batch, and NaN if none of its targets counts: pass weights where the numbers
        of counted targets may differ.
        """
        return linear_cross_entropy(
            self.enter(x), self.weight, target_ids, self.vocabulary, target_weights, self.compute_chunk
        )


class Decoder(nn.Module):
    """The module that transformers calls `model`; it exists for the names of the parameters."""

    def __init__(self, config: "PreTrainedConfig") -> None:
        super().__init__()
        layer = PostNormLayer if differences(config).norm_after else DecoderLayer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        # A dict by layer number, so that a layer keeps its name on a rank that removes other layers.
        self.layers = nn.ModuleDict({str(i): layer(config, i) for i in range(config.num_hidden_layers)})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, differences(config).norm_offset)


class Llama(nn.Module):
    """The language model.

    Args:
        config: see `model_config.load_model_config`, which rejects configs that this model does not support.
        attention_fn: causal attention of (q, k, v), see `fused_attention`.
        checkpoint_activations: whether to keep only each layer's input and to run its forward again in backward (Chen
            et al. 2016, arXiv:1604.06174).

    Attributes:
        cp_sharding: how context parallelism divides the sequences; None if it does not.
    """

    cp_sharding: str | None = None

    def __init__(
        self,
        config: "PreTrainedConfig",
        attention_fn: AttentionFn = fused_attention,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.attention_fn, self.checkpoint_activations = config, attention_fn, checkpoint_activations
        self.embedding_multiplier = differences(config).embedding_multiplier
        self.logits_scaling = differences(config).logits_scaling
        self.frequencies = rope_frequencies(config)
        self.model = Decoder(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the head, if this rank has it, use the embedding's matrix, if `tie_word_embeddings` is set."""
        if self.config.tie_word_embeddings and self.lm_head is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        hidden_states: Tensor | None = None,
        target_ids: Tensor | None = None,
        target_weights: Tensor | None = None,
        attention_fn: AttentionFn | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor:
        """Compute the logits (B, T, V), or the loss, a scalar, if target_ids or loss_fn are given. Without a head, as
        on a pipeline stage before the last one, return the hidden states (B, T, D).

        Args:
            input_ids: (B, T).
            position_ids: position of each token in its sequence, (B, T); by default 0, 1, 2, ..., but not with context
                parallelism, where ranks have other tokens.
            hidden_states: input of the layers, (B, T, D), from the previous stage; by default the embedded input_ids.
            target_ids: tokens to predict, (B, T).
            target_weights: weight of each target in the loss, (B, T), which is then a sum; by default a mean.
            attention_fn: by default that of the model.
            loss_fn: function to return instead of the loss, called as `loss_fn(head, x)` with the head's input x.
        """
        x = self.embed(input_ids) if hidden_states is None else hidden_states
        if position_ids is None:
            if self.cp_sharding:
                raise UserError("with context parallelism, pass the position_ids of this rank's tokens")
            position_ids = torch.arange(input_ids.size(1), device=x.device)[None]
        attend = attention_fn or self.attention_fn
        x = self.run_layers(x, position_ids, self.model.layers.values(), attend, self.checkpoint_activations)
        return x if self.lm_head is None else self.logits_or_loss(x, target_ids, target_weights, loss_fn)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed input_ids: (B, T) -> (B, T, D)."""
        x = self.model.embed_tokens(input_ids)
        # A tensor, because transformers rounds Gemma's factor to the dtype of x. (Granite's are exact in bfloat16.)
        return x if self.embedding_multiplier == 1 else x * torch.tensor(self.embedding_multiplier, dtype=x.dtype)

    def run_layers(
        self,
        x: Tensor,
        position_ids: Tensor,
        layers: Iterable[nn.Module],
        attend: AttentionFn,
        recomputes: bool = False,
    ) -> Tensor:
        """Apply decoder layers: x (B, T, D), position_ids (B, T) -> (B, T, D).

        Args:
            recomputes: whether backward runs the forward of each layer again.
        """
        # Of all T tokens, also with sequence parallelism: attention rotates what `project` has made full.
        cos, sin = (table.to(x.dtype) for table in rope(self.frequencies.to(x.device), position_ids))
        for layer in layers:
            if recomputes and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return x

    def logits_or_loss(
        self,
        x: Tensor,
        target_ids: Tensor | None = None,
        target_weights: Tensor | None = None,
        loss_fn: LossFn | None = None,
    ) -> Tensor:
        """Apply the final norm and the head: x (B, T, D) -> logits (B, T, V), or the loss, see `forward`."""
        x = self.model.norm(x)
        if self.logits_scaling != 1:
            x = x / self.logits_scaling  # the head is linear, and its input has fewer numbers than its logits
        if loss_fn is not None:
            return loss_fn(self.lm_head, x)
        return self.lm_head(x) if target_ids is None else self.lm_head.cross_entropy(x, target_ids, target_weights)
