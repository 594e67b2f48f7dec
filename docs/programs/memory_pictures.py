"""Pictures of a rank's memory, estimated: with each technique, with ZeRO, and while axes are added to a layout.

    python -m docs.programs.memory_pictures techniques --out docs/pictures/memory.svg

Of the ranks, it is the one that needs most.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig

from conformance.adapters.picotron import keys_of
from docs.programs.svg import TENSORS, main
from picotron.config import Model
from workbench.console import text_table
from workbench.drawing.draw_svg import LINE, WIDTH, Svg
from workbench.explain.hardware import HARDWARE
from workbench.pipelines.engine import check_layout
from workbench.pipelines.memory import GIB, Memory, rank_memory
from workbench.run.config_reader import parse_config
from workbench.run.model_config import load_model_config

PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")
TECHNIQUES = {  # layouts, in the words of conformance/adapters/picotron.py
    "dp 8": "dp8",
    "+ recomputation": "dp8",
    "+ zero1": "dp8 zero1",
    "+ zero3": "dp8 zero3",
    "+ zero3 + recomputation": "dp8 zero3",
    "tp 8": "tp8",
    "tp 8 + sequence parallel": "tp8 sp",
    "cp 8": "cp8",
    "pp 8, 1f1b": "pp8",
    "pp 8, afab": "pp8 afab",
}
AXES = {  # added one after the other, up to docs/seventy_billion.json
    "one GPU": "dp1",
    "tp 8": "tp8",
    "+ sequence parallel": "tp8 sp",
    "+ pp 4, interleaved": "pp4 tp8 sp interleaved_1f1b",
    "+ dp 32, zero1": "dp32 pp4 tp8 sp interleaved_1f1b zero1",
}


def memory_of(model: PreTrainedConfig, layout: str, training: dict[str, Any]) -> Memory:
    sections = {"model": {"name": "any"}, "dataset": {"name": "python-stdlib"}}
    config = parse_config({"distributed": keys_of(layout), "training": training, **sections})
    return max(rank_memory(config, model, check_layout(config, model)), key=lambda memory: memory.total)


def sizes(memory: Memory, unit: float) -> list[float]:
    """Return the sizes of PARTS. Gathered weights count as temporary."""
    found = [getattr(memory, part) for part in PARTS]
    return [size / unit for size in (*found[:-1], found[-1] + memory.gathered)]


def bars(rows: dict[str, list[float]], unit: str, caption: str, longest: float, limit: float = 0) -> str:
    """Draw a bar for each row; those above `longest` are cut. A grey area marks a limit."""
    left, row, top = 230.0, 42, LINE + 12
    scale = (WIDTH - left - 110) / longest
    picture = Svg(WIDTH, top + row * len(rows) + LINE + 8)
    drawn = PARTS[: max(map(len, rows.values()))]
    picture.keys(left - 50, 0, *((TENSORS[part], part) for part in drawn))
    picture.frame(left, top, limit * scale, row * len(rows))
    for i, (name, parts) in enumerate(rows.items()):
        x, y = left, top + 5 + i * row
        picture.text(0, y + 21, name)
        for part, size in zip(drawn, parts, strict=True):
            width = min(size * scale, WIDTH - 110 - x)
            picture.box(x, y, width, row - 10, TENSORS[part], f"{size:.3g}", f"{part}: {size:.3g} {unit}")
            x += width
        picture.text(x + 8, y + 21, f"{sum(parts):.4g} {unit}")
    picture.text(left, top + row * len(rows) + LINE, caption)
    return str(picture)


def techniques() -> str:
    """Draw SmolLM-1.7B on 8 ranks, and print the same numbers."""
    sizes_of_matrices = {"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192}
    model, rows = LlamaConfig(**sizes_of_matrices, num_hidden_layers=24, tie_word_embeddings=True), {}
    for name, layout in TECHNIQUES.items():
        micro_batches = 8 if "pp" in layout else 2  # without a pipeline, two are enough for the peak
        training: dict[str, Any] = {"seq_length": 2048, "micro_batch_size": 4}
        training["gradient_accumulation_steps"] = micro_batches
        training |= {"activation_checkpointing": "full"} if "recomputation" in name else {}
        rows[name] = sizes(memory_of(model, layout, training), GIB)
    print("SmolLM-1.7B on 8 ranks, micro-batches of 4 x 2048 tokens (8 of them with pp): GiB of a rank at its peak\n")
    table = [[name, *(f"{size:.2f}" for size in (*parts, sum(parts)))] for name, parts in rows.items()]
    print(text_table([["GiB", *PARTS, "peak"], *table], first_number=1))
    return bars(rows, "GiB", "GiB of the rank that needs most, at the peak of a step", max(map(sum, rows.values())))


def axes() -> str:
    """Draw docs/seventy_billion.json while its axes are added, one after the other."""
    training = json.loads(Path("docs/seventy_billion.json").read_text())["training"]
    model, limit = load_model_config(Model(name="docs/llama-3.1-70b")), HARDWARE["H100"].gib
    rows = {name: sizes(memory_of(model, layout, training), GIB) for name, layout in AXES.items()}
    caption = f"Grey: the {limit:.0f} GiB of an H100. The first bar is cut."
    return bars(rows, "GiB", caption, sum(rows["tp 8"]), limit)


def zero() -> str:
    """Draw the bytes per parameter that a rank of the quickstart's model holds between steps, in bfloat16."""
    model = load_model_config(Model(name="template/tiny-llama"))
    plain = memory_of(model, "dp2", {})
    rows = {"bucket, any number": sizes(plain, plain.parameters)[:3]}
    for n, engine in itertools.product((2, 8), ("zero1", "zero3")):
        memory = memory_of(model, f"dp{n} {engine}", {})
        rows[f"{engine}, {n} ranks"] = sizes(memory, plain.parameters)[:3]
    return bars(rows, "bytes", "bytes per parameter that a rank holds between steps, in bfloat16", 18)


if __name__ == "__main__":
    main(__doc__, techniques, axes, zero)
