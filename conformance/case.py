"""A case: a model folder, batches, hyperparameters and a layout, which a trainer and the reference both run.

case.json                        the fields of `Case`
model/                           a Hugging Face model folder in float32, from which training starts
batches.safetensors              input_ids, target_ids, ... of all steps
output/                          what the trainer writes: a model folder, or a checkpoint
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from conformance.models import FAMILIES, load_model
from conformance.result import NotOffered

AXES = ("dp", "pp", "cp", "tp")
# What chapters have besides steps: sizes that are no powers of two, a batch of packed documents, masked and weighted
# targets, several micro-batches, clipping, evaluations, a checkpoint from which the same or another layout resumes, and
# an embedding that is also the head. An adapter's tuple LACKS names those that its trainer does not have.
PARTS = (
    "odd",
    "documents",
    "masks",
    "weights",
    "accumulation",
    "clipping",
    "evaluation",
    "resume",
    "elsewhere",
    "tied",
)
IGNORED = -100
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, as an adapter gets it.

    Args:
        chapter: name of the chapter.
        layout: words, such as `dp2 x pp2 zbv`: the sizes of axes, and words whose meaning is the adapter's own.
        folder: folder of the case.
        dtype: dtype of the computation. With `bfloat16`, weights that the optimizer updates are in float32.
        micro_batches: number of micro-batches of a step on each dp rank.
        first_step: number of steps that `load` has completed.
        last_step: number of steps after which to stop.
        total_steps: length of the learning-rate schedule.
        warmup_steps: steps over which the learning rate rises to (step + 1) / (warmup_steps + 1) of its peak.
        min_lr_ratio: fraction of the learning rate at which its decay, half a cosine, ends; 1: it is constant.
        weight_decay: weight decay of matrices. Other parameters have none.
        beta1, beta2, eps: arguments of AdamW.
        max_grad_norm: largest norm of all gradients as one vector; None: no clipping.
        loss: `cross_entropy`, or `focal` for a loss of the user's own, see `token_losses`.
        evaluates: whether to compute the loss of the batch `evaluation()` after each step.
        new_tokens: number of tokens with which to continue each of `prompts()`, after the last step.
        load: folder of a checkpoint to resume from: `output` of another case; None: start from `model`.
        saves: whether to write a checkpoint to `output` after the last step.
        exports: whether to write a model folder to `output` after the last step.
    """

    chapter: str
    layout: str
    folder: Path
    dtype: str = "float64"
    micro_batches: int = 1
    first_step: int = 0
    last_step: int = 1
    total_steps: int = 1
    learning_rate: float = 1e-2
    warmup_steps: int = 0
    min_lr_ratio: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float | None = None
    loss: str = "cross_entropy"
    evaluates: bool = False
    new_tokens: int = 0
    load: Path | None = None
    saves: bool = False
    exports: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks on each axis: `dp2 x pp2 zbv` has {"dp": 2, "pp": 2, "cp": 1, "tp": 1}."""
        return sizes_of(self.layout)

    @property
    def words(self) -> list[str]:
        """The words of the layout that are the adapter's own."""
        return [word for word in self.layout.split() if word != "x" and not (is_size(word) or is_of_case(word))]

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def steps(self) -> range:
        """The steps to take, from 0."""
        return range(self.first_step, self.last_step)

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each step of the schedule."""
        return [self.learning_rate * self._factor(step) for step in range(self.total_steps)]

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weights that the optimizer updates."""
        return torch.promote_types(self.torch_dtype, torch.float32)

    @functools.cached_property
    def _batches(self) -> Batch:
        return load_file(self.folder / "batches.safetensors")

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step: tensors (G, T).

        It has `input_ids`, `target_ids` (-100: the target does not count) and `position_ids`. With packed documents, it
        has `document_ids`, from 0 in each row; with weighted targets, it has `target_weights`.
        """
        prefix = f"{step}."
        return {name.removeprefix(prefix): x for name, x in self._batches.items() if name.startswith(prefix)}

    def evaluation(self) -> Batch:
        """Return the batch for evaluations, like `batch`."""
        return self.batch(-1)

    def prompts(self) -> list[list[int]]:
        """Return the prompts to continue. All have the same length."""
        found: list[list[int]] = self._batches["prompts"].tolist()
        return found

    def model(self) -> PreTrainedModel:
        """Load transformers' model in the dtype of its weights, see `load_model`."""
        return load_model(self.model_folder, self.weight_dtype)

    def token_losses(self, logits: Tensor, target_ids: Tensor) -> Tensor:
        """Compute the loss of each target, in float32 or wider: (..., V), (...) -> (...); 0 for targets that do not
        count.
        """
        return LOSSES[self.loss](logits.to(torch.promote_types(logits.dtype, torch.float32)), target_ids)

    def require(self, condition: bool, reason: str) -> None:
        """Raise NotOffered unless a condition holds."""
        if not condition:
            raise NotOffered(reason)

    def write(self) -> None:
        """Write case.json. Its path is relative, so that folders of cases can be copied."""
        fields = dataclasses.asdict(self) | {"load": self.load and os.path.relpath(self.load, self.folder)}
        del fields["folder"]
        (self.folder / "case.json").write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Case":
        fields: dict[str, Any] = json.loads((folder / "case.json").read_text())
        return cls(
            **fields | {"folder": folder, "load": (folder / fields["load"]).resolve() if fields["load"] else None}
        )


def is_size(word: str) -> bool:
    return word[:2] in AXES and word[2:].isdigit() and int(word[2:]) > 0


def is_mistyped_size(word: str) -> bool:
    """Whether a word looks like a size, as dp0, DP2, dp=2 and dp2xtp2 do."""
    return not is_size(word) and re.match(rf"({'|'.join(AXES)})\W?\d", word, re.IGNORECASE) is not None


def is_of_model(word: str) -> bool:
    """Whether a word of a layout describes the model: a family, `tied`, `untied`, `llama3` for the rotary angles of
    Llama 3, or `kv4` for 4 key/value heads.
    """
    return word in FAMILIES or word in ("tied", "untied", "llama3") or (word[:2] == "kv" and word[2:].isdigit())


def is_of_case(word: str) -> bool:
    """Whether a word describes the model, or leaves out a part of a chapter, as `no_masks` does."""
    return is_of_model(word) or word.removeprefix("no_") in PARTS


def sizes_of(layout: str) -> dict[str, int]:
    """Return the number of ranks on each axis of a layout."""
    return dict.fromkeys(AXES, 1) | {word[:2]: int(word[2:]) for word in layout.split() if is_size(word)}


def focal(logits: Tensor, target_ids: Tensor) -> Tensor:
    """Compute the focal loss (Lin et al. 2017, arXiv:1708.02002) plus a z-loss (arXiv:2204.02311)."""
    losses = cross_entropy(logits, target_ids)
    z = 1e-2 * logits.logsumexp(-1).square()
    return torch.where(target_ids != IGNORED, (1 - (-losses).exp()) ** 2 * losses + z, 0.0)


def cross_entropy(logits: Tensor, target_ids: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), target_ids.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(target_ids.shape)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy, "focal": focal}


def weights_of(batch: Batch) -> Tensor:
    """Return the weights of the targets of a batch (G, T) in float64: 0 for those that do not count."""
    counted = (batch["target_ids"] != IGNORED).double()
    return counted * batch["target_weights"] if "target_weights" in batch else counted
