"""Attention of new tokens to the keys and values of all earlier ones, which are kept (KV cache).

So a new token costs a forward pass of one token. Sequences of different lengths end in the same column of the cache:
all new keys and values go to one column, and a mask hides the columns before the shorter ones.

    column   0 1 2 3 4 5 6 ...
             . . a b c d        `d` and `y` are the newest tokens, the columns from 6 on are room for the next ones
             t u v w x y
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron.model.llama import AttentionFn
from workbench.variants.packed import PackedDocuments, packed_attention

# Not cuDNN's, torch's first choice on Hopper GPUs: it would build a plan for each new number of columns, so each token.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BLOCK = 64  # columns by which a cache grows: copying it costs little if it is read 64 times in between


class KVCache:
    """The keys and values of b sequences in some layers.

    Args:
        lengths: number of tokens of each prompt.
        max_length: number of tokens of the longest sequence at the end.

    Attributes:
        kv: by layer, (2, b, K, columns, d).
        starts: first column of each sequence.
        length: number of columns in use.
    """

    def __init__(self, lengths: Sequence[int], max_length: int) -> None:
        self.length, self.max_length = max(lengths, default=0), max_length
        self.starts = [self.length - length for length in lengths]
        self.kv: dict[int, Tensor] = {}
        self.mask: Tensor | None = None

    @property
    def columns(self) -> int:
        """Number of columns with memory."""
        return min(-(-self.length // BLOCK) * BLOCK, self.max_length)

    def attention(self, layers: Iterable[int]) -> AttentionFn:
        """Return the attention function of a forward through some layers, which call it one after the other.

        The first forward has the prompts, as the documents of one row: q (1, H, N, d); k, v (1, K, N, d) ->
        (1, H, N, d). Each later one has one token of each sequence: q (b, H, 1, d); k, v (b, K, 1, d) -> (b, H, 1, d).
        """
        numbers = iter(layers)
        return lambda *qkv, **documents: self._attend(next(numbers), *qkv, **documents)

    def append(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for one more token of each sequence, and compute the mask, which all layers share."""
        self.length += 1
        for layer, kv in self.kv.items():
            if kv.size(3) < self.length:
                self.kv[layer] = F.pad(kv, (0, 0, 0, self.columns - kv.size(3)))
        if any(self.starts):
            hidden = torch.arange(self.length) < torch.tensor(self.starts)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self.mask = mask[:, None, None].to(device)  # (b, 1, 1, length)
        else:
            self.mask = None

    def keep(self, rows: list[int]) -> None:
        """Keep the sequences in `rows`, as often as each occurs there, and drop the columns that only others use."""
        self.starts = [self.starts[row] for row in rows]
        unused = min(self.starts, default=0)
        self.kv = {layer: kv[:, rows, :, unused:] for layer, kv in self.kv.items()} if rows else {}
        self.starts = [start - unused for start in self.starts]
        self.length, self.max_length = self.length - unused, self.max_length - unused

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        if documents is not None:
            self._fill(layer, k, v, documents)
            return packed_attention(q, k, v, documents)
        kv, now = self.kv[layer], self.length - 1
        kv[0, :, :, now], kv[1, :, :, now] = k[:, :, 0], v[:, :, 0]
        keys, values = kv[..., : self.length, :]
        # The query heads that share a key head are like several queries: (b, H, 1, d) -> (b, K, H/K, d). So no kernel
        # has to repeat keys.
        queries = q.view(len(q), k.size(1), -1, q.size(-1))
        with sdpa_kernel(KERNELS):
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.mask).reshape(q.shape)

    def _fill(self, layer: int, k: Tensor, v: Tensor, documents: PackedDocuments) -> None:
        """Store the keys and values of the prompts."""
        shape = (2, len(self.starts), k.size(1), self.columns, k.size(3))
        self.kv[layer] = k.new_zeros(shape)
        for row, (begin, end) in enumerate(pairwise(documents.boundaries)):
            columns = slice(self.starts[row], self.length)
            self.kv[layer][0, row, :, columns], self.kv[layer][1, row, :, columns] = (
                k[0, :, begin:end],
                v[0, :, begin:end],
            )
