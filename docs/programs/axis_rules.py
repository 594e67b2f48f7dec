"""The five rules of docs/when_an_axis_pays.md: the time of an axis's messages relative to the computation beside them.

    python -m docs.programs.axis_rules [--out FILE.svg]

They have the rates of an H100's data sheet, and count matrix products only.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from docs.programs.svg import LINE, RUNS, WIDTH, Panel, Svg
from docs.solutions.axes import H100, NETWORK, NVLINK
from picotron.config import Model
from picotron.model.families import part_parameters
from workbench.console import text_table
from workbench.run.model_config import load_model_config

MODEL, RANKS, TOKENS = "docs/llama-3.1-8b", 8, 8192
PLACES = {"NVLink": H100 / NVLINK, "network": H100 / NETWORK}  # FLOPs per byte


def rules() -> dict[str, Callable[[float, int], float]]:
    """Return the ratio of each axis, for FLOPs per byte and the number of tokens of a micro-batch on one rank."""
    model = load_model_config(Model(name=MODEL))
    layer, D, layers = part_parameters(model)[0], model.hidden_size, model.num_hidden_layers
    return {
        "dp, gradients": lambda ratio, t: 2 * ratio / t,
        "zero3, weights and gradients": lambda ratio, t: 1.5 * ratio / t,
        f"tp {RANKS}, hidden states": lambda ratio, t: 4 * ratio * RANKS * D / layer,
        f"cp {RANKS}, keys and values": lambda ratio, t: 2 * ratio * model.num_key_value_heads / model.num_attention_heads / t,
        f"pp {RANKS}, hidden states": lambda ratio, t: 2 / 3 * ratio * D / (layers // RANKS * layer),
    }  # fmt: skip


def table() -> str:
    rows = [["", *(word for name in PLACES for word in (name, "equal at"))]]
    for name, rule in rules().items():
        row = [name]
        for ratio in PLACES.values():
            here, twice = rule(ratio, TOKENS), rule(ratio, 2 * TOKENS)
            equal = f"tp {RANKS / here:.2g}" if name.startswith("tp") else "-"
            row += [f"{here:.2g}", f"{here * TOKENS:,.0f} tokens" if twice < here else equal]
        rows.append(row)
    caption = f"{MODEL}, {RANKS} ranks: time of messages / time of computation, for {TOKENS:,} tokens"
    return f"{caption}\n\n{text_table(rows, first_number=1)}"


def picture() -> str:
    """Draw the ratios over the number of tokens. Both axes are logarithmic: tokens from 256 to 65,536, and ratios from
    0.001 to 1,000. In the grey area, computation hides the messages.
    """
    left, top, height = 54.0, 2.0 * LINE + 10, 396.0
    svg, width = Svg(WIDTH, top + height + 2 * LINE + 10), (WIDTH - 2 * 54 - 60) / 2
    for i, (colour, name) in enumerate(zip(RUNS, rules(), strict=True)):
        svg.keys(left + i % 3 * 300, i // 3 * LINE, (colour, name))
    for i, (name, ratio) in enumerate(PLACES.items()):
        panel = Panel(svg, left + i * (width + 84), top, width, height, (8, 16), (-3, 3))
        svg.frame(panel.left, top + height / 2, width, height / 2)
        panel.scales({e: f"{2**e:,}" for e in range(8, 17, 2)}, {e: f"{10.0**e:g}" for e in range(-3, 4)})
        for colour, rule in zip(RUNS, rules().values(), strict=True):
            panel.line([(e, math.log10(rule(ratio, 2**e))) for e in range(8, 17)], colour)
        svg.text(panel.left + 6, top + 18, name, "title")
    caption = "tokens of a micro-batch on a rank; upwards: time of messages / time of computation"
    svg.text(left, top + height + 2 * LINE, caption)
    return str(svg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also draw the ratios into this .svg file")
    options = parser.parse_args()
    print(table())
    if options.out is not None:
        options.out.write_text(picture(), encoding="utf-8")
