"""Memory of a rank with and without each technique, by formula and counted:

    python -m docs.programs.memory_bars [--out FILE.svg]

The model is SmolLM-1.7B in bfloat16, on 8 ranks. Counted are the bytes of the tensors of a step on a fake GPU (see
benchmarks/gpu/fake_cuda.py, which needs the compiler g++), on the pp rank that needs most.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from benchmarks.gpu.fake_cuda import obstacle, restart_with_fake_cuda
from benchmarks.gpu.fake_cuda_memory import measure
from benchmarks.shapes import SHAPES
from docs.programs.svg import LINE, TENSORS, WIDTH, Svg
from picotron.command_line import parse_config
from picotron.console import text_table
from picotron.explain.estimate import GIB, Memory, rank_memory
from picotron.parallelize import check_layout

FULL = {"activation_checkpointing": "full"}
TECHNIQUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the layout, and of the training
    "dp 8": ({"dp_size": 8}, {}),
    "+ recomputation": ({"dp_size": 8}, FULL),
    "+ zero1": ({"dp_size": 8, "dp_engine": "zero1"}, {}),
    "+ zero3": ({"dp_size": 8, "dp_engine": "zero3"}, {}),
    "+ zero3 + recomputation": ({"dp_size": 8, "dp_engine": "zero3"}, FULL),
    "tp 8": ({"tp_size": 8}, {}),
    "tp 8 + sequence parallel": ({"tp_size": 8, "sequence_parallel": True}, {}),
    "cp 8": ({"cp_size": 8}, {}),
    "pp 8, 1f1b": ({"pp_size": 8}, {}),
    "pp 8, afab": ({"pp_size": 8, "pp_engine": "afab"}, {}),
}
PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


def memory_of(layout: dict[str, Any], training: dict[str, Any]) -> tuple[Memory, dict[str, int]]:
    """Return the estimated and the counted memory of the rank that needs most by the estimate."""
    model = LlamaConfig(**SHAPES["smollm-1.7b"], pad_token_id=None)
    micro_batches = 8 if "pp_size" in layout else 2  # without a pipeline, two are enough for the peak
    config = parse_config(
        {
            "distributed": layout,
            "model": {"name": "smollm-1.7b"},
            "training": {
                "seq_length": 2048,
                "micro_batch_size": 4,
                "gradient_accumulation_steps": micro_batches,
                **training,
            },
            "dataset": {"name": "python-stdlib"},
        }
    )
    memories = rank_memory(config, model, check_layout(config, model))
    heaviest = max(range(len(memories)), key=lambda rank: memories[rank].total)
    counted = measure(config, model, heaviest * config.distributed.cp_size * config.distributed.tp_size)
    return memories[heaviest], counted


def table(found: dict[str, tuple[Memory, dict[str, int]]]) -> str:
    rows = [["GiB", *PARTS, "peak", "counted"]]
    for name, (memory, counted) in found.items():
        sizes = [getattr(memory, part) for part in PARTS]
        sizes[-1] += memory.gathered
        rows.append([name, *(f"{size / GIB:.2f}" for size in (*sizes, memory.total, counted["peak"]))])
    error = max(abs(memory.total / counted["peak"] - 1) for memory, counted in found.values())
    return f"{text_table(rows, first_number=1)}\n\nlargest difference of peak and counted: {error:.1%}"


def bars(found: dict[str, tuple[Memory, dict[str, int]]]) -> str:
    """Draw two bars for each technique: the estimate above, the count below."""
    left, row = 230.0, 46
    scale = (WIDTH - left - 90) / max(memory.total for memory, _ in found.values())
    picture = Svg(WIDTH, 2 * LINE + 10 + row * len(found))
    picture.keys(left - 50, 0, *((TENSORS[part], part) for part in PARTS), ("", "counted"))
    for number, (name, (memory, counted)) in enumerate(found.items()):
        x, y = left, LINE + 10 + row * number
        picture.text(0, y + 24, name)
        sizes = [getattr(memory, part) for part in PARTS]
        sizes[-1] += memory.gathered
        for part, size in zip(PARTS, sizes, strict=True):
            picture.box(x, y, size * scale, 20, TENSORS[part], f"{size / GIB:.1f}", f"{part}: {size / GIB:.2f} GiB")
            x += size * scale
        picture.text(x + 8, y + 24, f"{memory.total / GIB:.1f} GiB")
        picture.frame(left, y + 22, counted["peak"] * scale, 12)
        picture.line(left + counted["state"] * scale, y + 22, left + counted["state"] * scale, y + 34)
    y = LINE + 10 + row * len(found)
    picture.text(left, y + 14, "GiB of the rank that needs most; left of the mark: what persists between steps")
    return str(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also draw the table as bars into this .svg file")
    options = parser.parse_args()
    if problem := obstacle():
        sys.exit(f"error: {problem}")
    restart_with_fake_cuda()
    found = {name: memory_of(*changes) for name, changes in TECHNIQUES.items()}
    print("SmolLM-1.7B on 8 ranks, micro-batches of 4 x 2048 tokens (8 of them with pp): GiB of a rank at its peak\n")
    print(table(found))
    if options.out is not None:
        options.out.write_text(bars(found), encoding="utf-8")


if __name__ == "__main__":
    main()
