"""Pictures of a model: its families, its numbers in 8 bits, and its memory on a GPU.

python -m docs.programs.model_pictures families --out docs/pictures/families.svg
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from docs.programs.quickstart import quickstart, stage_of
from docs.programs.svg import LINE, RANKS, TENSORS, WIDTH, Panel, Svg, main
from picotron.command_line import load_config
from picotron.drawing.draw_svg import COLOURS, lighter
from picotron.explain.estimate import GIB, Memory, rank_memory
from picotron.explain.fake_group import fake_rank
from picotron.explain.hardware import HARDWARE
from picotron.model.families import FAMILIES, Differences, differences
from picotron.model.float8 import E4M3, E5M2, quantise
from picotron.model.llama import Llama
from picotron.model.model_config import load_model_config
from picotron.parallelize import check_layout
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

LAYERS = 4
# What the default configs of transformers leave out: sizes, and the four multipliers of Granite.
SIZES = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
ROWS = {  # the operations of a block, and the parameter that they have in a layer, or else their differences
    "embedding": ("", ("embedding_multiplier",)),
    "norm of the input": ("input_layernorm.weight", ()),
    "q, k, v: weights": ("self_attn.k_proj.weight", ()),
    "q, k, v: biases": ("self_attn.k_proj.bias", ()),
    "norm of q and k": ("self_attn.k_norm.weight", ()),
    "rotation of q and k": ("", ("unrotated",)),
    "scores": ("", ("window", "attention_multiplier")),
    "output projection": ("self_attn.o_proj.weight", ()),
    "norm of the output": ("post_feedforward_layernorm.weight", ()),
    "sum with the input": ("", ("residual_multiplier",)),
    "logits": ("", ("logits_scaling",)),
}
WORDS = {"unrotated": f"{LAYERS - 1} of {LAYERS}", "window": "window", **dict.fromkeys(MULTIPLIERS, "factor")}


def kinds_of_parameters(config: PreTrainedConfig) -> dict[str, str]:
    """Return whether each parameter of the last layer is sharded, replicated or summed over two tp ranks."""
    with fake_rank(0, quickstart(tp_size=2).distributed), torch.device("meta"):
        layer = apply_tensor_parallel(Llama(config), sequence_parallel=False).model.layers[str(LAYERS - 1)]
        found = {}
        for module_name, module in layer.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                is_sharded = name in getattr(module, "shards", {})
                is_summed = name in getattr(module, "partial_gradients", {})
                kind = "sharded" if is_sharded else "summed" if is_summed else "replicated"
                found[f"{module_name}.{name}"] = kind
    return found


def families() -> str:
    """Draw a table of the operations of a block in each family: their parameters on two tp ranks, and differences."""
    left, row, top = 178.0, 30, 2 * LINE + 12
    column = (WIDTH - left) / len(FAMILIES)
    picture, replicated = Svg(WIDTH, top + row * len(ROWS) + 4), lighter("#888888", 0.5)
    halves = ((RANKS[rank], f"shard of rank {rank}") for rank in range(2))
    picture.keys(0, 0, *halves, (replicated, "replicated"), (COLOURS["R"], "replicated, gradients summed"))
    for number, family in enumerate(FAMILIES):
        x, options = left + number * column, dict.fromkeys(MULTIPLIERS, 0.5) if family == "granite" else {}
        config = AutoConfig.for_model(family, **SIZES, **options)
        kinds, differs = kinds_of_parameters(config), differences(config)
        picture.text(x + column / 2 - 3, top - 10, family, "centred")
        for i, (operation, (parameter, fields)) in enumerate(ROWS.items()):
            y = top + i * row
            if number == 0:
                picture.text(0, y + 19, operation)
            kind = kinds.get(parameter)
            words = [WORDS[each] for each in fields if getattr(differs, each) != getattr(Differences(), each)]
            if kind == "sharded":
                for rank in range(2):
                    half = (column - 6) / 2
                    picture.box(x + rank * half, y, half, row - 5, RANKS[rank], title=f"{parameter}: rank {rank}")
            elif kind:
                picture.box(
                    x, y, column - 6, row - 5, replicated if kind == "replicated" else COLOURS["R"], title=parameter
                )
            elif words:
                picture.box(x, y, column - 6, row - 5, "#ffffff", ", ".join(words))
    return str(picture)


def operands() -> dict[str, tuple[Tensor, torch.dtype, str]]:
    """Return the weights of a matrix of the quickstart's model, and the gradient of its outputs in the first backward,
    each with its format and colour.
    """
    config, caught = quickstart(), list[Tensor]()
    with fake_rank(0, config.distributed):
        model: Any = stage_of(config).module.double()  # so that the picture is the same on all machines
        matrix = model.model.layers["0"].mlp.down_proj
        matrix.register_full_backward_hook(lambda _, __, gradients: caught.append(gradients[0]))
        ids = torch.randint(model.config.vocab_size, (2, 257), generator=torch.Generator().manual_seed(0))
        model(ids[:, :-1], target_ids=ids[:, 1:]).backward()
    return {
        "weights": (matrix.weight.detach(), E4M3, TENSORS["weights"]),
        "gradients": (caught[0], E5M2, TENSORS["gradients"]),
    }


def float8() -> str:
    """Draw the positive numbers of both formats on a logarithmic axis, and between them the sizes of real operands, as
    they are and divided by their scale.
    """
    left, width, row, top = 150.0, WIDTH - 160.0, 84, LINE + 4
    picture, low, high = Svg(WIDTH, top + 6 * row + 2 * LINE), -25, 17
    picture.text(0, 16, "Grey: a line for each number of the format. Colour: how many elements have this size.")
    for number, (name, (tensor, dtype, colour)) in enumerate(operands().items()):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        numbers = numbers[numbers.isfinite() & (numbers > 0)]
        for i, (title, values) in enumerate(
            {
                str(dtype).removeprefix("torch.float8_")[:4]: numbers,
                name: tensor.abs().flatten(),
                f"{name} / scale": (tensor.abs() / quantise(tensor, dtype)[1]).flatten(),
            }.items()
        ):
            panel = Panel(picture, left, top + (3 * number + i) * row, width, row - 34, (low, high), (0, 0.2))
            picture.text(0, panel.top + 20, title, "" if i else "title")
            if i == 0:
                for value in values.log2().tolist():
                    x, _ = panel.place(value, 0)
                    picture.line(x, panel.top, x, panel.top + panel.height)
                continue
            counts = torch.histc(values[values > 0].log2(), 2 * (high - low), low, high) / len(values)
            for step, share in enumerate(counts.tolist()):
                (x, y), (right, bottom) = panel.place(low + step / 2, share), panel.place(low + step / 2 + 0.5, 0)
                if share:
                    picture.box(x, y, right - x, bottom - y, colour, title=f"{share:.1%}")
            lost = (values.to(dtype) == 0).float().mean().item()
            coarse = (values < torch.finfo(dtype).smallest_normal).float().mean().item() - lost
            picture.text(left, panel.top + row - 14, f"{lost:.1%} become 0, {coarse:.1%} keep fewer bits")
    panel = Panel(picture, left, top, width, 6 * row, (low, high), (0, 1))
    panel.scales({e: f"2^{e}" for e in range(-24, high, 8)}, {})
    return str(picture)


STEPS: dict[str, dict[str, Any]] = {  # changes of the layout, one after the other
    "one GPU": {"tp_size": 1, "pp_size": 1, "dp_size": 1, "sequence_parallel": False, "pp_engine": "1f1b", "dp_engine": "bucket"},
    "tp 8": {"tp_size": 8},
    "+ sequence parallel": {"sequence_parallel": True},
    "+ pp 4, interleaved": {"pp_size": 4, "pp_engine": "interleaved_1f1b"},
    "+ dp 32, zero1": {"dp_size": 32, "dp_engine": "zero1"},
}  # fmt: skip


def axes_applied() -> str:
    """Draw the estimated memory of a GPU of docs/seventy_billion.json while its axes are added, one after the other."""
    memories, layout = dict[str, Memory](), dict[str, Any]()
    for name, changes in STEPS.items():
        layout |= changes
        options = [word for key, value in layout.items() for word in (f"--distributed.{key}", str(value).lower())]
        config = load_config(["--config", "docs/seventy_billion.json", *options])
        model = load_model_config(config.model)
        memories[name] = max(rank_memory(config, model, check_layout(config, model)), key=lambda each: each.total)
    left, row, limit = 186.0, 42, HARDWARE["H100"].gib
    scale = (WIDTH - left - 120) / (list(memories.values())[1].total / GIB)  # the first bar is cut
    parts = [field.name for field in dataclasses.fields(Memory) if field.name in TENSORS and field.name != "gathered"]
    picture, top = Svg(WIDTH, 2 * LINE + 24 + row * len(memories)), LINE + 12
    picture.keys(0, 0, *((TENSORS[part], part) for part in parts))
    picture.frame(left, top, limit * scale, row * len(memories))
    for i, (name, memory) in enumerate(memories.items()):
        x, y = left, top + 5 + i * row
        picture.text(0, y + 21, name)
        for part in parts:
            size = getattr(memory, part) / GIB
            width = min(size * scale, WIDTH - 120 - x)
            picture.box(x, y, width, row - 10, TENSORS[part], f"{size:.1f}", f"{part}: {size:.1f} GiB")
            x += width
        picture.text(x + 8, y + 21, f"{memory.total / GIB:,.0f} GiB")
    picture.text(left, top + row * len(memories) + LINE, f"Grey: the {limit:.0f} GiB of an H100. The first bar is cut.")
    return str(picture)


if __name__ == "__main__":
    main(__doc__, families, float8, axes_applied)
