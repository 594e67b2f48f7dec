"""Traffic and memory of a training step of the quickstart's model, counted and by formula:

    python -m docs.programs.count tensor_parallel        (or context_parallel, zero)

The step is that of train.py, run by one rank in a fake process group (`workbench.explain.fake_group`). Numbers are
float32. In the formulas, a micro-batch has B sequences of T tokens; the model has L layers, hidden size D, intermediate
size F, H query heads and K key/value heads of size d, and P parameters.
"""

import argparse
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from docs.programs.quickstart import quickstart, stage_of
from picotron.config import Config
from picotron.model.families import model_cost
from workbench.console import text_table
from workbench.explain.explain import run_rank
from workbench.explain.fake_group import fake_rank
from workbench.pipelines.engine import plan_pipeline
from workbench.run.model_config import load_model_config
from workbench.run.with_keys import with_keys

MIB = 2**20
CONFIG = quickstart()
MODEL = load_model_config(CONFIG.model)
B, T = CONFIG.training.micro_batch_size, CONFIG.training.seq_length
L, D, F = MODEL.num_hidden_layers, MODEL.hidden_size, MODEL.intermediate_size
HD, KD = MODEL.num_attention_heads * MODEL.head_dim, MODEL.num_key_value_heads * MODEL.head_dim
P = model_cost(MODEL, T).parameters
BTD = 4 * B * T * D / MIB
one_micro_batch = functools.partial(quickstart, gradient_accumulation_steps=1)
Row = tuple[Any, ...]


class Traffic(NamedTuple):
    """Collectives and messages of a rank in a step, by operation. Collectives use a ring."""

    counts: Counter[str]  # collectives and messages
    mib: dict[str, float]  # sent by the rank


def traffic(config: Config, axis: str = "") -> Traffic:
    """Count what rank 0 sends in a step (along one axis), except the few numbers of clipping and metrics."""
    sent = Traffic(Counter(), defaultdict(float))
    for message, times in run_rank(0, config, MODEL, plan_pipeline(config, MODEL)).messages.items():
        if message.shape and message.axis != "world" and axis in ("", message.axis):
            sent.counts[message.operation] += times
            sent.mib[message.operation] += times * message.sent / MIB
    return sent


TP_LAYOUTS = ((1, False), (2, False), (2, True), (4, False), (4, True))  # tp_size, sequence_parallel


def tp_name(tp: int, sequence_parallel: bool) -> str:
    return f"tp {tp}" + (", sequence parallel" if sequence_parallel else "")


def hidden_states_sent() -> Iterator[Row]:
    """Traffic of a rank per micro-batch. A unit is (tp - 1)/tp B T D numbers. A layer sends 8 units, with sequence
    parallelism 10; embedding and head together 4; the loss 6/D. The last three columns are numbers of collectives.
    """
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    yield "", "unit, MiB", "units", "formula, MiB", "counted, MiB", *(f"{kind}s" for kind in kinds)
    for tp, sp in TP_LAYOUTS:
        counts, mib = traffic(one_micro_batch(tp_size=tp, sequence_parallel=sp))
        unit, units = (tp - 1) / tp * BTD, L * (10 if sp else 8) + 4 + 6 / D
        yield tp_name(tp, sp), unit, units, units * unit, sum(mib.values(), 0.0), *(counts[kind] for kind in kinds)


def kept_by(layer: Any, shape: tuple[int, int, int], positions: int) -> int:
    """Count the bytes that a decoder layer's forward keeps for its backward, without weights and rotary tables.

    Args:
        shape: shape of the layer's input on this rank, (B, T, D) or a shard of it.
        positions: number of positions in the rotary tables.
    """
    angle = torch.zeros(1, positions, 1, layer.self_attn.head_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    not_counted = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), cos, sin)}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(shape, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x, cos, sin)
    del y
    return sum(kept.values())


def layer_kept() -> Iterator[Row]:
    """Memory of a rank: its parameters, and the activations that one layer keeps for its backward. The two norms keep
    norms = 6 B T D numbers, attention and MLP keep blocks = B T (2 H d + 2 K d + 4 F) numbers.
    """
    norms, blocks = 6 * BTD, B * T * (2 * HD + 2 * KD + 4 * F) * 4 / MIB
    yield "", "parameters, MiB", "kept, counted, MiB", "kept, formula, MiB", "formula"
    for tp, sp in TP_LAYOUTS:
        config = one_micro_batch(tp_size=tp, sequence_parallel=sp)
        size, formula = (
            ((norms + blocks) / tp, "(norms + blocks)/tp") if sp else (norms + blocks / tp, "norms + blocks/tp")
        )
        with fake_rank(0, config.distributed):
            stage = stage_of(config)
            parameters = sum(parameter.nbytes for parameter in stage.parameters()) / MIB
            kept = kept_by(stage.module.model.layers["0"], (B, T // tp if sp else T, D), T) / MIB
        yield tp_name(tp, sp), parameters, kept, size, formula


def bytes_sent() -> Iterator[Row]:
    """Traffic of one of n ranks in a step of m micro-batches, in bytes per parameter, in bfloat16. Formula: (n - 1)/n
    times 4 + 4 (bucket), 4 + 2 (zero1), or at most (2 + 2 + 4) m (zero3, whose last layer is gathered once).
    """
    yield "", "m", "collectives", "counted", "formula"
    for n, m in ((2, 1), (2, 4), (8, 1), (8, 4)):
        for engine, full in (("bucket", 8), ("zero1", 6), ("zero3", 8 * m)):
            config = quickstart(dp_size=n, dp_engine=engine, gradient_accumulation_steps=m)
            config = with_keys(config, model={"dtype": "bfloat16"})
            counts, mib = traffic(config, axis="cp_dp")
            sent = sum(mib.values()) * MIB / P
            yield f"n = {n}, {engine}", m, counts.total(), sent, full * (n - 1) / n


def keys_and_values_sent() -> Iterator[Row]:
    """Traffic of a rank per micro-batch: for the attention of one layer, with q = B T H d queries and kv = 2 B T K d
    keys and values; and to average the gradients, 2 (cp - 1)/cp P numbers.
    """
    q, kv = 4 * B * T * HD / MIB, 8 * B * T * KD / MIB
    formulas: dict[str, tuple[str, Callable[[int], float]]] = {
        "ring": ("(3 cp - 2)/cp kv", lambda cp: (3 * cp - 2) / cp * kv),
        "all_gather": ("3 (cp - 1)/cp kv", lambda cp: 3 * (cp - 1) / cp * kv),
        "ulysses": ("2 (cp - 1)/cp (2 q + kv)/cp", lambda cp: 2 * (cp - 1) / cp * (2 * q + kv) / cp),
    }
    yield "", "attention, MiB", "formula, MiB", "formula", "gradients, MiB", "formula, MiB"
    for cp in (2, 4):
        for engine, (text, formula) in formulas.items():
            _, mib = traffic(one_micro_batch(cp_size=cp, cp_engine=engine))
            gradients = mib.pop("all-reduce")
            yield (
                f"cp {cp}, {engine}",
                sum(mib.values()) / L,
                formula(cp),
                text,
                gradients,
                2 * (cp - 1) / cp * 4 * P / MIB,
            )


PAGES = {
    "tensor_parallel": (hidden_states_sent, layer_kept),
    "context_parallel": (keys_and_values_sent,),
    "zero": (bytes_sent,),
}


def show(table: Callable[[], Iterator[Row]]) -> None:
    """Print a table below its docstring. The first column is aligned to the left."""
    cells = [[f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in table()]
    print(inspect.getdoc(table), text_table(cells, first_number=1), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=PAGES)
    for each in PAGES[parser.parse_args().page]:
        show(each)
