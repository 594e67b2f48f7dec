"""Classic mistakes of generation, see docs/programs/mistakes.py."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from docs.programs.mistake import Mistake
from picotron.generation.kv_cache import KVCache
from picotron.generation.rotation import Group
from tests.generation import test_generation

correct_append, correct_init, correct_cache_append = Group.append, Group.__init__, KVCache.append


def positions_from_zero(group: Group, tokens: Tensor, dtype: torch.dtype) -> None:
    correct_append(group, tokens, dtype)
    group.inputs["position_ids"] = torch.zeros_like(group.inputs["position_ids"])


def no_mask(cache: KVCache, dtype: torch.dtype, device: torch.device) -> None:
    correct_cache_append(cache, dtype, device)
    cache.mask = None


def one_stream(group: Group, prompts: dict[int, Sequence[int]], *arguments: Any) -> None:
    correct_init(group, prompts, *arguments)
    group.streams = dict.fromkeys(prompts, random.Random(f"{group.sampling.seed}"))


TOKENS = test_generation.test_tokens_equal_transformers_and_draws_those_of_one_process
GENERATION = "picotron.generation.rotation.Group"
MISTAKES = {
    "every_token_is_the_first": Mistake(
        "generation",
        "Every new token has the position 0, because it is the only token of its row.",
        {f"{GENERATION}.append": positions_from_zero},
        TOKENS,
        ({"pp_size": 3},),
    ),
    "empty_columns_seen": Mistake(
        "generation",
        "New tokens of short prompts attend to the empty columns of the cache, too, because there is no mask.",
        {"picotron.generation.kv_cache.KVCache.append": no_mask},
        TOKENS,
        ({"pp_size": 3},),
    ),
    "one_stream_of_draws": Mistake(
        "generation",
        "All prompts of a group draw from one stream of random numbers.",
        {f"{GENERATION}.__init__": one_stream},
        TOKENS,
        ({"pp_size": 3},),
    ),
}
