"""Memory that ring attention keeps for backward: through autograd (steps/s9_cp.py), and in picotron's RingAttention.

    python -m docs.programs.ring_memory

The unit is a KV shard, the keys and values of one rank's tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from conformance.worker_pool import WorkerPool
from picotron.context_parallel.context_parallel import attend_across_ranks
from picotron.process_group_manager import setup_process_group_manager
from steps import communication as comm
from steps import llama, s9_cp
from workbench.console import text_table


def kept(attention: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int) -> tuple[float, float]:
    """Count what attention saves for the backward of a rank with `tokens` tokens, and how much of it is scores."""
    storages: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        return storages.setdefault(x.untyped_storage().data_ptr(), x)

    heads = (llama.HEADS, llama.KV_HEADS, llama.KV_HEADS)
    q, k, v = (torch.randn(4, n, tokens, llama.HEAD_DIM, dtype=llama.DTYPE, requires_grad=True) for n in heads)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(q, k, v)
    saved = [(x.untyped_storage().nbytes(), x.shape[-2:] == (tokens, tokens)) for x in storages.values()]
    shard = k.nbytes + v.nbytes
    return sum(size for size, _ in saved) / shard, sum(size for size, scores in saved if scores) / shard


def count(cp: int, length: int) -> tuple[float, float, float]:
    """Return the counts of both for the last rank."""
    setup_process_group_manager(1, cp, 1, 1)
    comm.make_groups("cp", cp=cp)
    llama.LENGTH = length
    picotron, _ = kept(attend_across_ranks("zigzag"), length // cp)
    return *kept(s9_cp.ring_attention, length // cp), picotron


def main() -> None:
    pool, runs = WorkerPool(), [(length, cp) for length in (256, 1024) for cp in (1, 2, 4)]
    rows = [[f"{T}", f"{cp}", *(f"{each:.1f}" for each in pool.run(count, cp, cp, T)[-1])] for T, cp in runs]
    pool.close()
    head = ["T", "cp", "autograd, KV shards", "of these, scores", "RingAttention, KV shards"]
    print(text_table([head, *rows], first_number=0))


if __name__ == "__main__":
    main()
