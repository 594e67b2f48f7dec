"""Solution to exercise 1 of docs/generation.md: the size of a cache."""

from transformers import LlamaConfig


def cache_bytes(config: LlamaConfig, sequences: int, tokens: int, bytes_per_number: int = 2) -> int:
    """Return the bytes of the keys and values of sequences with this number of tokens each, in all layers."""
    per_token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return per_token * sequences * tokens * bytes_per_number
