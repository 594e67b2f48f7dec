"""The symbols in the formulas of `estimate` and `forecast`. No torch here."""

from typing import TYPE_CHECKING, NamedTuple

from picotron.config import Config

if TYPE_CHECKING:
    from transformers import LlamaConfig


class Sizes(NamedTuple):
    """Values of the symbols in the formulas of `estimate`, for one tp rank."""

    number: int  # bytes of a weight or an activation
    wide: int  # bytes of a number in float32 or wider
    tokens: int  # per micro-batch
    D: int
    shard: int  # D, or D / tp with sequence parallelism
    heads: int  # H / tp
    queries: int  # H d / tp
    kv: int  # K d / tp
    F: int  # F / tp
    vocabulary: int  # V / tp, padded


def sizes(config: Config, model: "LlamaConfig") -> Sizes:
    """Compute the symbols for a config and a model."""
    layout, training = config.distributed, config.training
    number = {"bfloat16": 2, "float32": 4, "float64": 8}[config.model.dtype]
    heads = model.num_attention_heads // layout.tp_size
    return Sizes(
        number=number,
        wide=max(4, number),
        tokens=training.micro_batch_size * training.seq_length // layout.cp_size,
        D=model.hidden_size,
        shard=model.hidden_size // (layout.tp_size if layout.sequence_parallel else 1),
        heads=heads,
        queries=heads * model.head_dim,
        kv=max(1, model.num_key_value_heads // layout.tp_size) * model.head_dim,
        F=model.intermediate_size // layout.tp_size,
        vocabulary=-(-model.vocab_size // layout.tp_size),
    )
