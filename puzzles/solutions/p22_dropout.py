"""Solution of puzzle 22: the random bits are a hash of where a number is. (The keys are hashes, too: with a layer's own
number as the key, the bits of layer 1 would be those of layer 0, with neighbours exchanged.)
"""

import torch
from torch import Tensor

from workbench.variants.bfloat16_states import Elements, random_bits

RATE = 0.25


def dropout(y: Tensor, samples: Tensor, positions: Tensor, layer: int) -> Tensor:
    tokens = samples[:, None] * 1_000_003 + positions  # an odd factor, so that no small difference becomes 0
    numbers = (tokens[..., None] * y.size(-1) + torch.arange(y.size(-1))) & 2**31 - 1
    bits = random_bits(numbers.int(), torch.tensor(Elements("dropout").keys(0, layer), dtype=torch.int32))
    return y * ((bits & 0xFFFF) >= RATE * 2**16) / (1 - RATE)
