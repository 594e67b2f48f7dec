"""Peak memory of a step with each kind of recomputation, beside the estimate."""

import dataclasses
import functools

from benchmarks.gpu.report import Content, Options, Part, header
from benchmarks.gpu.speed import Workload, estimated_gb, measured, picotron
from benchmarks.shapes import SHAPES

LAYERS = 4  # of Llama-3.1-8B, so that weights and optimizer leave most of the memory to activations


def memory_section(options: Options) -> Content:
    """Return the section of the report."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, "tie_word_embeddings": False}
    shape = SHAPES["llama-3.2-1b"] | sizes | {"num_hidden_layers": LAYERS}
    workload = dataclasses.replace(Workload("Llama-3.1-8B", shape, 4096, options.device), rows=4)
    parts = []
    for compiles in (True, False) if options.compiled else (False,):
        for kind in ("none", "selective", "full"):
            training = {"activation_checkpointing": kind, "compile": compiles}
            name = f"{kind}, {'compiled' if compiles else 'eager'}"
            step = functools.partial(picotron, workload, **training)
            estimate = estimated_gb(workload, **training)
            run = functools.partial(measured, workload, name, step, estimate, options)
            parts.append(Part([workload.name, str(workload.rows), name], run, 30))
    columns = ("ms per step", "tokens/s", "MFU", "allocated, GB", "reserved, GB", "estimate, GB")
    return [
        f"{LAYERS} layers of Llama-3.1-8B with embedding and head, sequences of 4,096 tokens, as in the section on speed. The",
        "column of the trainer has the kind of recomputation.",
        *header("model", "rows", "recomputation", *columns),
        *parts,
    ]
