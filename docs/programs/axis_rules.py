"""When an axis pays: rates of devices, and the time of each axis's messages relative to the computation beside them.

    python -m docs.programs.axis_rules rates                      FLOPs per byte of memory, link and network
    python -m docs.programs.axis_rules ratios [--out FILE.svg]    each rule beside the forecast of picotron

docs/when_an_axis_pays.md derives the rules. They have the rates of data sheets and count matrix products only. The
forecast (`picotron.explain.forecast`) has the rates that programs reach, and counts all operations.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from docs.programs.svg import LINE, RUNS, WIDTH, Panel, Svg
from picotron.command_line import load_config
from picotron.config import Model
from picotron.console import text_table
from picotron.explain.forecast import Clock
from picotron.explain.hardware import HARDWARE, Hardware
from picotron.explain.measure import find_hardware
from picotron.model.flops import part_parameters
from picotron.model.model_config import load_model_config
from picotron.pipeline_parallel.stages import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL, RANKS_OF_AXIS, MOST_TOKENS = "docs/llama-3.1-8b", 8, 8192


class Rates(NamedTuple):
    """Rates of a device: FLOP/s of products, and bytes/s of its memory, to a rank in its node and to another node."""

    products: float
    memory: float
    link: float
    network: float


# Data sheets, see `picotron.explain.hardware`: dense bfloat16, and one direction of NVLink and of a network card.
DATA_SHEETS = {
    "H100": Rates(989e12, 3.35e12, 450e9, 50e9),
    "H200": Rates(989e12, 4.8e12, 450e9, 50e9),
    "A100": Rates(312e12, 2.039e12, 300e9, 25e9),
    "RTX4090": Rates(165e12, 1.008e12, 32e9, 12.5e9),
}


class Rule(NamedTuple):
    """The time of an axis's messages, relative to the computation that hides them or waits for them.

    Args:
        by_rule: the ratio, for FLOP/s over bytes/s and a number of tokens; on one rank, as all tokens here.
        by_forecast: the same ratio in the forecast, for hardware and a number of tokens.
    """

    name: str
    by_rule: Callable[[float, int], float]
    by_forecast: Callable[[Hardware, int], float]


def clock(hardware: Hardware, tokens: int, **layout: Any) -> Clock:
    """Return the times of actions of the model, for micro-batches with this number of tokens on each rank."""
    length = tokens if "cp_size" in layout else min(tokens, MOST_TOKENS)
    sequences = tokens // length
    changes = {"training.seq_length": length * layout.get("cp_size", 1), "training.micro_batch_size": sequences}
    sizes = {f"{axis}_size": 1 for axis in ("dp", "pp", "cp", "tp")} | {"dp_engine": "bucket"} | layout
    changes |= {f"distributed.{key}": value for key, value in sizes.items()}
    changes |= {"model.name": MODEL, "distributed.sequence_parallel": "tp_size" in layout}
    options = [str(each).lower() for key, value in changes.items() for each in (f"--{key}", value)]
    config = load_config(["--config", "docs/seventy_billion.json", *options])
    return Clock(config, load_model_config(config.model), hardware)


def load_model() -> "PreTrainedConfig":
    return load_model_config(Model(name=MODEL))


def rules(model: "PreTrainedConfig", n: int = RANKS_OF_AXIS) -> list[Rule]:
    """Return the rules of a model, for n ranks of each axis."""
    layer, embedding, head = part_parameters(model)
    everything = model.num_hidden_layers * layer + embedding + head
    D, K_over_H = model.hidden_size, model.num_key_value_heads / model.num_attention_heads
    stage = Stage(range(1, 1 + model.num_hidden_layers // n))
    whole = Stage(range(model.num_hidden_layers), has_embedding=True, has_head=True)

    def dp(hardware: Hardware, tokens: int) -> float:
        times = clock(hardware, tokens, dp_size=n)
        return times.dp_messages(whole).reduction / times.work(whole, "B").compute

    def zero3(hardware: Hardware, tokens: int) -> float:
        times = clock(hardware, tokens, dp_size=n, dp_engine="zero3")
        sent = (2 + 4) * everything * (n - 1) / n
        return times.collective("dp", sent, 2 * (model.num_hidden_layers + 2)) / times.work(whole, "B").compute

    def tp(hardware: Hardware, tokens: int) -> float:
        forward = clock(hardware, tokens, tp_size=n).layer["F"]
        return forward.tp / forward.compute

    def cp(hardware: Hardware, tokens: int) -> float:
        times = clock(hardware, tokens, cp_size=n)
        block = 2 * times.s.tokens * times.s.kv * times.s.number
        return times.collective("cp", block, 1 / (n - 1)) / (times.attention[0] / n)

    def pp(hardware: Hardware, tokens: int) -> float:
        times = clock(hardware, tokens, pp_size=n)
        return 2 * times.message / sum(times.work(stage, kind).compute for kind in "FB")

    return [
        Rule("dp, gradients", lambda ratio, t: 2 * ratio / t, dp),
        Rule("zero3, weights and gradients", lambda ratio, t: 1.5 * ratio / t, zero3),
        Rule(f"tp {n}, hidden states", lambda ratio, t: 4 * ratio * n * D / layer, tp),
        Rule(f"cp {n}, keys and values", lambda ratio, t: 2 * ratio * K_over_H / t, cp),
        Rule(f"pp {n}, hidden states", lambda ratio, t: 2 / 3 * ratio * D / (len(stage.layers) * layer), pp),
    ]


def places() -> list[tuple[str, float, Hardware]]:
    """Return the two places of a group, with FLOP/s over bytes/s: in a node, and with each rank in another node."""
    sheet, here = DATA_SHEETS["H100"], HARDWARE["H100"]
    spread = dataclasses.replace(here, node=1)
    return [
        ("NVLink", sheet.products / sheet.link, here),
        ("network", sheet.products / sheet.network, spread),
    ]


def rates() -> str:
    here = find_hardware("this", load_config(["--config", "docs/small.json"]))
    devices = dict(DATA_SHEETS)
    devices["this machine, a core"] = Rates(here.rate("float32"), here.memory, here.link, here.link)
    rows = [
        ["", "TFLOP/s", "memory, GB/s", "link, GB/s", "network, GB/s", "FLOPs per byte of memory", "link", "network"]
    ]
    for name, (products, *bandwidths) in devices.items():
        numbers = [f"{products / 1e12:.3g}", *(f"{each / 1e9:,.4g}" for each in bandwidths)]
        rows.append([name, *numbers, *(f"{products / each:,.0f}" for each in bandwidths)])
    return text_table(rows, first_number=1)


def ratios() -> str:
    headings = [word for name, _, _ in places() for word in (f"{name}: equal at", "rule", "forecast")]
    rows = [["", *headings]]
    for rule in rules(load_model()):
        row = [rule.name]
        for _, ratio, hardware in places():
            here, twice = (rule.by_rule(ratio, tokens) for tokens in (MOST_TOKENS, 2 * MOST_TOKENS))
            row += [f"{here * MOST_TOKENS:,.0f} tokens" if twice < here else "-"]
            row += [f"{here:.2g}", f"{rule.by_forecast(hardware, MOST_TOKENS):.2g}"]
        rows.append(row)
    caption = f"{MODEL}, {RANKS_OF_AXIS} ranks: time of messages / time of computation, for {MOST_TOKENS:,} tokens"
    return f"{caption}\n\n{text_table(rows, first_number=1)}"


def picture() -> str:
    """Draw the ratios over the number of tokens: lines for the rules, dots for the forecast. Both axes are logarithmic:
    tokens from 256 to 65,536, and ratios from 0.001 to 1,000. In the grey area, computation hides the messages.
    """
    lines, left, top, height = rules(load_model()), 54.0, 2.0 * LINE + 10, 396.0
    svg, width = Svg(WIDTH, top + height + 2 * LINE + 10), (WIDTH - 2 * 54 - 60) / 2
    for i, (colour, rule) in enumerate(zip(RUNS, lines, strict=True)):
        svg.keys(left + i % 3 * 300, i // 3 * LINE, (colour, rule.name))
    for i, (name, ratio, hardware) in enumerate(places()):
        panel = Panel(svg, left + i * (width + 84), top, width, height, (8, 16), (-3, 3))
        svg.frame(panel.left, top + height / 2, width, height / 2)
        panel.scales({e: f"{2**e:,}" for e in range(8, 17, 2)}, {e: f"{10.0**e:g}" for e in range(-3, 4)})
        for colour, rule in zip(RUNS, lines, strict=True):
            tokens = [2**exponent for exponent in range(8, 17)]
            panel.line([(math.log2(t), math.log10(rule.by_rule(ratio, t))) for t in tokens], colour)
            for t in tokens:
                panel.dot(math.log2(t), math.log10(rule.by_forecast(hardware, t)), colour)
        svg.text(panel.left + 6, top + 18, name, "title")
    svg.text(
        left,
        top + height + 2 * LINE,
        "tokens of a micro-batch on a rank; upwards: time of messages / time of computation",
    )
    return str(svg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "ratios"])
    parser.add_argument("--out", type=Path, help="also draw the ratios into this .svg file")
    options = parser.parse_args()
    print(rates() if options.what == "rates" else ratios())
    if options.out is not None:
        options.out.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
