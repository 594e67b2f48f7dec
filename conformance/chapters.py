"""The chapters: what a trainer should compute, one cause of differences at a time, and the cases that check it."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conformance.case import IGNORED, Case, is_of_model, sizes_of
from conformance.models import FAMILIES, small_config, write_model

PROMPTS, PROMPT_LENGTH = 4, 6
FIVE = {
    "last_step": 5,
    "total_steps": 5,
    "warmup_steps": 2,
    "min_lr_ratio": 0.1,
    "weight_decay": 0.1,
    "max_grad_norm": 1.65,  # between the norms of the five steps: two of them are clipped
}
# Gradients near 0 have a wrong sign after rounding: a large eps keeps their updates small.
NARROW, LONG = {"total_steps": 3, "eps": 1e-2}, {"max_position_embeddings": 320}
RUNS: Any = {"runs": (1, 3), "shape": (8, 320)}  # bfloat16 has no odd numbers above 256, such as positions


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A chapter.

    Args:
        summary: the numbers that are compared, or the situation.
        changes: fields of `Case`.
        model: keys of config.json.
        data: what batches have besides tokens: `masks`, `weights` or `documents`.
        micro_batches: number of micro-batches of a step on each dp rank without a pipeline, and with one.
        resumes: `same` for a run that resumes in its own layout, `other` for one that resumes in another.
        runs: numbers of steps of several runs from the same start.
        shape: number of sequences of a global batch, and their length.
    """

    summary: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""
    micro_batches: tuple[int, int] = (1, 4)
    resumes: str = ""
    runs: tuple[int, ...] = ()
    shape: tuple[int, int] = (16, 16)


CHAPTERS = {
    "step": Chapter("loss, gradients, gradient norm and weights of one step"),
    "steps": Chapter("five steps with clipping, weight decay, warm-up and decay of the learning rate", FIVE),
    "accumulation": Chapter("the same with several micro-batches", FIVE, micro_batches=(4, 8)),
    "odd": Chapter("sizes of the vocabulary and the MLP that are no powers of two", FIVE, {"vocab_size": 61, "intermediate_size": 52}),
    "tied": Chapter("embedding and head share their weight", FIVE, {"tie_word_embeddings": True}),
    "packed": Chapter("rows of several documents, which do not see each other", {"last_step": 2}, data="documents"),
    "masks": Chapter("unequal numbers of targets, in some rows none", {"last_step": 2}, data="masks", micro_batches=(2, 4)),
    "weights": Chapter("targets with weights", {"last_step": 2}, data="weights", micro_batches=(2, 4)),
    "evaluation": Chapter("evaluations between the steps", {"last_step": 3, "evaluates": True}, data="masks"),
    "resume": Chapter("a checkpoint after two steps, and three more steps", FIVE, resumes="same"),
    "elsewhere": Chapter("the same, resumed in another layout", FIVE, resumes="other"),
    "export": Chapter("a model folder that transformers loads", {"exports": True, "last_step": 2}, {"tie_word_embeddings": True}),
    "generation": Chapter("the likeliest continuations of prompts", {"last_step": 0, "new_tokens": 10}),
    "loss": Chapter("a loss of the user's own: focal loss plus z-loss", {"last_step": 2, "loss": "focal"}, micro_batches=(2, 4)),
    "float32": Chapter("one step and three steps in float32", NARROW | {"dtype": "float32"}, runs=(1, 3)),
    "mixed": Chapter("the same in bfloat16 with float32 master weights", NARROW | {"dtype": "bfloat16"}, LONG, **RUNS),
}  # fmt: skip

ROPE = {"rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = ROPE | {"rope_type": "llama3", "original_max_position_embeddings": 32}

SINGLE = ("dp2", "tp2", "cp2", "pp2")
PAIRS = ("dp2 x pp2", "dp2 x cp2", "dp2 x tp2", "pp2 x cp2", "pp2 x tp2", "cp2 x tp2")


# With two ranks, the next one is the one before, and a stage holds one activation. A key/value head can be on several
# ranks. Other families have biases, norms inside heads, and other rotary angles.
STEPS = (*SINGLE, *PAIRS, "dp4", "tp4", "cp4", "pp4", "tp2 kv1", "tp2 qwen2", "tp2 qwen3", "dp1 llama3")


def model_of(layout: str, keys: dict[str, Any]) -> Any:
    """Return the config of the model that the words of a layout describe, see `is_of_model`."""
    words = [word for word in layout.split() if is_of_model(word)]
    family = next((word for word in words if word in FAMILIES), "llama")
    kv = next((int(word[2:]) for word in words if word[:2] == "kv"), 4)
    tied: dict[str, Any] = {"tie_word_embeddings": "tied" in words} if {"tied", "untied"} & set(words) else {}
    tied |= {"rope_parameters": LLAMA3} if "llama3" in words else {}
    sizes = {"vocab_size": 64, "intermediate_size": 48}
    return small_config(family, num_attention_heads=8, num_key_value_heads=kv, **sizes | keys | tied)


def batches(steps: int, vocab_size: int, data: str, sequences: int, length: int) -> dict[str, Tensor]:
    """Draw the batches of all steps, and one for evaluations."""
    found: dict[str, Tensor] = {}
    for step in range(-1, steps):
        generator = torch.Generator().manual_seed(1000 + step)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.rand(shape, dtype=torch.float64, generator=generator)

        ids = torch.randint(vocab_size, (sequences, length + 1), generator=generator)
        batch = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}
        if data == "masks":  # a row keeps between none and all of its targets
            kept = draw(sequences, length) < draw(sequences, 1) * (torch.arange(sequences) % 8 > 0)[:, None]
            batch["target_ids"] = torch.where(kept, batch["target_ids"], IGNORED)
        if data == "weights":
            batch["target_weights"] = draw(sequences, length) * (draw(sequences, 1) + (draw(sequences, length) > 0.3))
        positions = torch.arange(length).expand(sequences, -1)
        if data == "documents":
            batch["document_ids"] = (draw(sequences, length) < 0.2).long().index_fill(1, torch.tensor([0]), 0).cumsum(1)
            starts = torch.cat([torch.ones(sequences, 1), batch["document_ids"].diff(dim=1)], 1).bool()
            positions = positions - torch.where(starts, positions, 0).cummax(1).values
        batch["position_ids"] = positions
        found |= {f"{step}.{name}": tensor.contiguous() for name, tensor in batch.items()}
    found["prompts"] = torch.randint(vocab_size, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    return found


def cases_of(name: str, layout: str, other: str, folder: Path, **changes: Any) -> list[Case]:
    """Write the cases of a chapter in a layout: one, or two of which the second resumes from the first.

    Args:
        other: layout to resume in, in the chapter `elsewhere`.
        folder: folder of the cases, which is made.
        changes: fields of `Case` that replace those of the chapter.
    """
    chapter = CHAPTERS[name]
    fields = {"last_step": 1} | chapter.changes | changes
    fields.setdefault("total_steps", max(1, fields["last_step"]))
    fields.setdefault("micro_batches", chapter.micro_batches[sizes_of(layout)["pp"] > 1])
    first = Case(name, layout, folder / "1", **fields)
    second = other if chapter.resumes == "other" else layout
    layers = 2 * max(sizes_of(each)["pp"] for each in (layout, second))
    config = model_of(layout, chapter.model | {"num_hidden_layers": layers})
    cases = [first]
    if chapter.resumes:
        resumed: dict[str, Any] = {"layout": second, "first_step": 2, "load": first.output, "folder": folder / "2"}
        resumed["micro_batches"] = chapter.micro_batches[sizes_of(second)["pp"] > 1]
        cases = [dataclasses.replace(first, last_step=2, saves=True), dataclasses.replace(first, **resumed)]
    if chapter.runs and "last_step" not in changes:
        cases = [dataclasses.replace(first, last_step=n, folder=folder / f"{n}") for n in chapter.runs]
    last = max(case.last_step for case in cases)
    for i, case in enumerate(cases):
        case.output.mkdir(parents=True)
        case.write()
        if i:
            case.model_folder.symlink_to(cases[0].model_folder)
            (case.folder / "batches.safetensors").symlink_to(cases[0].folder / "batches.safetensors")
        else:
            write_model(case.model_folder, config)
            save_file(
                batches(last, config.vocab_size, chapter.data, *chapter.shape), case.folder / "batches.safetensors"
            )
    return cases
