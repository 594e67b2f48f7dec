"""The chapters: what a trainer should compute, and the cases that check it. The chapter `run` has everything that
changes a step at once; the trace says which part of it a trainer has wrong.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conformance.case import IGNORED, Batch, Case, is_of_model, sizes_of
from conformance.models import FAMILIES, small_config, write_model

PROMPTS, PROMPT_LENGTH = 4, 6
# No two of these sizes are equal, nor are two learning rates: one of them in place of another would change nothing.
SIZES = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 320}
EVEN, ODD = {"vocab_size": 64, "intermediate_size": 88}, {"vocab_size": 61, "intermediate_size": 100}
RUN: dict[str, Any] = {
    "last_step": 5,
    "total_steps": 7,
    "warmup_steps": 2,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.1,
    "eps": 1e-2,  # Adam divides a common factor of all gradients out, such as that of clipping, but for eps
}
PARTS_OF_RUN = ("odd", "documents", "masks", "weights", "accumulation", "clipping", "evaluation", "resume")
NARROW: dict[str, Any] = {"last_step": 3}


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A chapter.

    Args:
        summary: the numbers that are compared, or the situation.
        changes: fields of `Case`.
        parts: the `PARTS` that it has, if the trainer does.
        micro_batches: number of micro-batches of a step on each dp rank without a pipeline, and with one.
        saves: number of steps before the checkpoint from which the part `resume` continues.
        shape: number of sequences of a global batch, and their length.
        documents: how many boundaries of documents a sequence has, on average.
        norms: norm to which gradients are clipped, with masked targets and without: between the norms of the steps.
        layers: layers for each pp rank without a schedule, at least; there are two or more.
        model: keys of config.json.
    """

    summary: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[str, ...] = ()
    micro_batches: tuple[int, int] = (1, 4)
    saves: int = 0
    shape: tuple[int, int] = (16, 40)
    documents: float = 2.0
    norms: tuple[float, float] = (3.1, 1.95)
    layers: int = 2
    model: dict[str, Any] = dataclasses.field(default_factory=dict)


CHAPTERS = {
    "step": Chapter("loss, gradients, gradient norm and weights of one step"),
    "run": Chapter(
        "five steps with everything that training has, of which the last two resume in another layout",
        RUN, (*PARTS_OF_RUN, "elsewhere"), (2, 8), saves=3,
    ),
    "loss": Chapter("a loss of the user's own: focal loss plus z-loss", {"last_step": 2, "loss": "focal"}, (), (2, 4)),
    "export": Chapter("a model folder that transformers loads", {"exports": True, "last_step": 2}, ("tied",)),
    "generation": Chapter("the likeliest continuations of prompts", {"last_step": 0, "new_tokens": 10}),
    "float32": Chapter(
        "three steps of a run in float32, of which the last two resume", RUN | NARROW | {"dtype": "float32"},
        PARTS_OF_RUN, (2, 4), saves=1, norms=(3.3, 1.95), layers=1,
    ),
    # bfloat16 has no odd numbers above 256, such as positions, and of a head's frequencies the first only. With this
    # theta, the others are far from numbers in bfloat16.
    "mixed": Chapter(
        "the same in bfloat16 with float32 master weights", RUN | NARROW | {"dtype": "bfloat16"},
        (*PARTS_OF_RUN, "tied"), (2, 4), saves=1, shape=(8, 320), documents=0.7, norms=(1.5, 1.0), layers=1,
        model={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.13}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 6.0}},
    ),
}  # fmt: skip

ROPE = {"rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Of a head's three frequencies, one is kept, one interpolated and one divided by the factor.
LLAMA3 = ROPE | {"rope_type": "llama3", "original_max_position_embeddings": 64}

SINGLE = ("dp2", "tp2", "cp2", "pp2")
PAIRS = ("dp2 x pp2", "dp2 x cp2", "dp2 x tp2", "pp2 x cp2", "pp2 x tp2", "cp2 x tp2")
# With two ranks, the next one is the one before, and a stage holds one activation. A key/value head can be on several
# ranks. Other families have biases, norms inside heads, and other rotary angles.
FOUR = ("dp4", "tp4", "cp4", "pp4")
MODELS = ("tp2 kv1", "tp2 tied", "pp2 tied", "tp2 qwen2", "tp2 qwen3", "dp1 llama3")


def model_of(layout: str, keys: dict[str, Any], own: Mapping[str, Any]) -> Any:
    """Return the config of the model that the words of a layout describe, see `is_of_model`, or the adapter's own."""
    words = [word for word in layout.split() if is_of_model(word)]
    family = next((word for word in words if word in FAMILIES), own.get("model_type", "llama"))
    heads = [{"num_key_value_heads": int(word[2:])} for word in words if word[:2] == "kv"] or [{}]
    found: dict[str, Any] = SIZES | keys | heads[0]
    found |= {"tie_word_embeddings": "tied" in words} if {"tied", "untied"} & set(words) else {}
    found |= {"rope_parameters": LLAMA3} if "llama3" in words else {}
    return small_config(family, **found | {key: value for key, value in own.items() if key != "model_type"})


def counted(step: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Change the weights (G, T) of targets so that their sum is half a unit beside a number in bfloat16: leave targets
    out, or scale weights that are not 0 or 1.
    """
    unit = 2.0 ** (((weights > 0).sum() / 1.2).log2().floor().item() - 8)
    total = unit * (256 + 2 * step + 3)
    if weights.frac().any():
        return weights * (total / weights.sum())
    order = weights * torch.rand(weights.shape, dtype=torch.float64, generator=generator)
    return (order >= order.flatten().topk(int(total)).values[-1]).double()


def draw_batch(step: int, vocab_size: int, parts: Collection[str], chapter: Chapter, seed: int) -> Batch:
    """Draw the global batch of a step. Every other one has few targets: large gradients."""
    (sequences, length), generator = chapter.shape, torch.Generator().manual_seed(1000 * (seed + 1) + step)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    ids = torch.randint(vocab_size, (sequences, length + 1), generator=generator)
    batch, weights = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}, torch.ones(sequences, length).double()
    if "masks" in parts:  # a row keeps between none and all of its targets
        rate = (draw(sequences, 1) + step % 2) / (1 + step % 2) * (torch.arange(sequences) % 8 > 0)[:, None]
        weights = (draw(sequences, length) < rate).double()
    if "weights" in parts:
        weights = weights * draw(sequences, length) * (draw(sequences, 1) + (draw(sequences, length) > 0.3))
    if {"masks", "weights"} & {*parts}:
        weights = counted(step, weights, generator)
    if "weights" in parts:
        batch["target_weights"] = weights
    if "masks" in parts:
        batch["target_ids"] = torch.where(weights > 0, batch["target_ids"], IGNORED)
    positions = torch.arange(length).expand(sequences, -1)
    if "documents" in parts:
        rate = chapter.documents / length * 2 * draw(sequences, 1)
        ends = draw(sequences, length - 1) < rate
        ends[:, 1:] &= ~ends[:, :-1].clone()  # by its first two tokens, a trace knows a document
        ends[:, [0, -1]] = False
        batch["document_ids"] = torch.cat([torch.zeros(sequences, 1), ends], 1).long().cumsum(1)
        starts = torch.cat([torch.ones(sequences, 1), batch["document_ids"].diff(dim=1)], 1).bool()
        positions = positions - torch.where(starts, positions, 0).cummax(1).values
    return batch | {"position_ids": positions}


def write_batches(path: Path, steps: int, vocab_size: int, parts: Collection[str], chapter: Chapter, seed: int) -> None:
    """Write the batches of all steps, one for evaluations, and prompts."""
    found: Batch = {}
    for step in range(-1, steps):
        batch = draw_batch(step, vocab_size, parts, chapter, seed)
        found |= {f"{step}.{name}": tensor.contiguous() for name, tensor in batch.items()}
    found["prompts"] = torch.randint(
        vocab_size, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed + 1)
    )
    save_file(found, path)


def cases_of(
    name: str,
    layout: str,
    other: str,
    folder: Path,
    without: Collection[str],
    seed: int = 0,
    own: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[Case]:
    """Write the cases of a chapter in a layout: one, or two of which the second resumes from the first.

    Args:
        other: layout to resume in, if the chapter has `elsewhere`.
        folder: folder of the cases, which is made.
        without: the `PARTS` that the trainer does not have.
        seed: seed of the weights and the batches.
        own: keys of the adapter's own config.json.
        changes: fields of `Case` that replace those of the chapter.
    """
    left_out = {*without, *(word[3:] for word in layout.split() if word[:3] == "no_")}
    chapter, parts = CHAPTERS[name], tuple(part for part in CHAPTERS[name].parts if part not in left_out)
    count = chapter.micro_batches if "accumulation" in parts or not chapter.parts else (1, chapter.micro_batches[1])
    fields = {"last_step": 1, "evaluates": "evaluation" in parts} | chapter.changes
    if "clipping" in parts:
        fields["max_grad_norm"] = chapter.norms["masks" not in parts]
    fields |= {"micro_batches": count[sizes_of(layout)["pp"] > 1]} | changes
    fields.setdefault("total_steps", max(1, fields["last_step"]))
    first = Case(name, layout, folder / "1", **fields)
    resumes = "resume" in parts and fields["last_step"] > chapter.saves
    second = other if resumes and "elsewhere" in parts else layout
    each = 2 if first.words else chapter.layers  # a schedule can have two stages on each rank
    layers = max(2, *(each * sizes_of(one)["pp"] for one in (layout, second)))
    keys = (ODD if "odd" in parts else EVEN) | {"num_hidden_layers": layers, "tie_word_embeddings": "tied" in parts}
    config = model_of(layout, keys | chapter.model, own or {})
    cases = [first]
    if resumes:
        resumed: dict[str, Any] = {"layout": second, "first_step": chapter.saves, "load": first.output}
        resumed |= {"folder": folder / "2", "micro_batches": count[sizes_of(second)["pp"] > 1]}
        cases = [dataclasses.replace(first, last_step=chapter.saves, saves=True), dataclasses.replace(first, **resumed)]
    for i, case in enumerate(cases):
        case.output.mkdir(parents=True)
        case.write()
        if i:
            case.model_folder.symlink_to(cases[0].model_folder)
            (case.folder / "batches.safetensors").symlink_to(cases[0].folder / "batches.safetensors")
        else:
            write_model(case.model_folder, config, seed)
            path = case.folder / "batches.safetensors"
            write_batches(path, first.last_step, config.vocab_size, parts, chapter, seed)
    return cases
