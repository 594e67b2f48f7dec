"""Context parallelism: speed and memory of two processes, compared with one process on as many cores, and with torch's
experimental context_parallel where that runs; balance of the work; activations in memory.

python -m benchmarks.context_parallel
"""

import itertools
import statistics
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.side_by_side import Variant, measure, print_markdown, print_table
from benchmarks.workload import (
    ON_GPU,
    TINY,
    arguments,
    device_of,
    loader_of,
    model_config,
    picotron_step,
    require_gpus,
    run_config,
    stage_of,
    torch_adamw,
)
from picotron.context_parallel.context_parallel import attend_across_ranks
from picotron.context_parallel.positions import visible_blocks
from picotron.model.llama import Llama, fused_attention
from workbench.explain.fake_group import fake_rank

CP = 2
LENGTHS = (32, 128) if TINY else (2048, 8192)
LAYERS = 24 if ON_GPU and not TINY else 2  # attention over 8,192 tokens is slow on a CPU


def one_sequence(seq_length: int) -> dict[str, Any]:
    return {"seq_length": seq_length, "micro_batch_size": 1, "gradient_accumulation_steps": 1}


def torch_step(rank: int, seq_length: int) -> Callable[[], Any]:
    """Return a step of the same model under torch.distributed.tensor.experimental.context_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    device, config = device_of(rank), run_config({"dp_size": CP}, **one_sequence(seq_length))
    llama = stage_of(config, device, getattr(torch, config.model.dtype), LAYERS).module
    loader = loader_of(config, device)
    loader.dp_rank = 0  # all ranks load the same full sequences, which torch shards
    mesh = init_device_mesh(device.type, (CP,))
    optimizer = torch_adamw(llama.parameters())

    def step() -> Tensor:
        batch = next(loader)
        ids, targets, positions = (batch[name].clone() for name in ("input_ids", "target_ids", "position_ids"))
        with torch_context_parallel(mesh, buffers=[ids, targets, positions], buffer_seq_dims=[1, 1, 1]):
            loss = llama(ids, positions, target_ids=targets)
            loss.backward()
        for parameter in llama.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def speed(turns: int, steps: int) -> None:
    for seq_length in LENGTHS:
        one = "one process" if ON_GPU else f"one process, {CP} threads"
        step = partial(picotron_step, layers=LAYERS, **one_sequence(seq_length))
        variants = [Variant(one, partial(step, threads=CP), ({},))]
        for engine, sharding in (
            ("ring", "zigzag"),
            ("ring", "contiguous"),
            ("all_gather", "zigzag"),
            ("ulysses", "zigzag"),
        ):
            layout = {"cp_size": CP, "cp_engine": engine, "cp_sharding": sharding}
            variants.append(Variant(f"cp {CP}, {engine}, {sharding}", step, (layout,), CP))
        try:
            measure([Variant("torch", torch_step, (seq_length,), CP)], 0, 1)
            variants.append(Variant("torch, context_parallel", torch_step, (seq_length,), CP))
        except Exception as error:
            print(f"\ntorch's context_parallel does not run here: {str(error).splitlines()[0]}")
        print(f"\nSequences of {seq_length:,} tokens, {LAYERS} layers")
        print_table(measure(variants, turns, steps), seq_length, one)


def attention_work(cp: int, sharding: str) -> float:
    """Return the busiest rank's attention work divided by the mean, in blocks; a causal one counts half."""
    work, tokens = [], 64
    for rank in range(cp):
        with fake_rank(rank, run_config({"cp_size": cp}).distributed):
            blocks = [block for source in range(cp) for block in visible_blocks(source, tokens, sharding)]
        pairs = [
            len(range(tokens)[queries]) * len(range(tokens)[keys]) / (2 if causal else 1)
            for queries, keys, causal, _ in blocks
        ]
        work.append(sum(pairs))
    return max(work) / statistics.mean(work)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in this mode: `now`, and their `peak`. Views of older tensors,
    and results that are written into them, do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.known | given:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def activation_bytes(cp: int, engine: str) -> tuple[int, int, int]:
    """Count the activations of a decoder layer on one rank, for a sequence of 2,048 tokens, without weights and their
    gradients.

    Returns:
        The bytes after forward, the peak of forward and backward, and the peak of attention alone.
    """
    config, length = model_config(), 2048 // cp
    layout = run_config({"cp_size": cp, "cp_engine": engine}).distributed
    with fake_rank(0, layout):
        with torch.device("meta"):
            llama = Llama(config)
        layer = llama.model.layers["0"].to_empty(device="cpu")
        attend = attend_across_ranks(layout, fused_attention) if cp > 1 else fused_attention
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        angle = torch.zeros(1, length, 1, config.head_dim // 2)
        with LiveBytes() as live:
            x = torch.zeros(1, length, config.hidden_size, requires_grad=True)
            y = layer(x, angle.cos(), angle.sin(), attend)
            kept = live.now
            y.backward(torch.zeros_like(y))
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        q, k, v = (torch.zeros(1, n, length, config.head_dim, requires_grad=True) for n in heads)
        with LiveBytes() as attention:
            y = attend(q, k, v)
            y.backward(torch.zeros_like(y))
    return kept, live.peak, attention.peak


def balance() -> None:
    print("\nAttention work of the busiest rank divided by the mean over ranks, in blocks")
    rows = [["cp", "zigzag", "contiguous", "(2 cp - 1)/cp"]]
    for cp in (2, 4, 8):
        ratios = (attention_work(cp, "zigzag"), attention_work(cp, "contiguous"), (2 * cp - 1) / cp)
        rows.append([str(cp), *(f"{ratio:.3f}" for ratio in ratios)])
    print_markdown(rows)


def activations() -> None:
    print("\nActivations of one layer on a rank, for a sequence of 2,048 tokens, float32")
    rows = [["cp", "engine", "after forward, MiB", "peak, MiB", "peak relative to cp 1", "attention alone, peak, MiB"]]
    _, peak_of_one, _ = activation_bytes(1, "ring")
    for cp, engine in ((1, "ring"), *itertools.product((2, 4), ("ring", "all_gather", "ulysses"))):
        sizes = activation_bytes(cp, engine)
        kept, peak, attention = (f"{size / 2**20:.1f}" for size in sizes)
        rows.append([str(cp), engine if cp > 1 else "-", kept, peak, f"{sizes[1] / peak_of_one:.2f}", attention])
    print_markdown(rows)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    balance()
    activations()
    require_gpus(CP)
    speed(options.turns, options.steps)


if __name__ == "__main__":
    main()
