"""Training in float16, for GPUs before Ampere, which have no bfloat16: loss scaling (Micikevicius et al. 2017,
arXiv:1710.03740).

float16 has 11 bits of precision, three more than bfloat16, but its numbers end at 65,504, and those below 6e-5 lose
precision, down to 0 below 3e-8. Many gradients are that small. So the gradients of the logits, with which backward
begins, are computed times a loss scale, and with them all others, and they are divided by it in float32, in which they
accumulate. If any rank's gradients overflow, no rank updates its weights in this step. The scale follows the rule of
`torch.amp.GradScaler`: half of it after such a step, twice as much after `interval` steps without one.
"""

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn

from picotron.console import UserError
from picotron.model.cross_entropy import ChunkLoss, VocabularyShard
from picotron.optimizer import AdamW, clip_grad_norm, scale_gradients
from picotron.parallelize import unwrap

logger = logging.getLogger("picotron")


@dataclasses.dataclass
class LossScale:
    """The loss scale, equal on all ranks. Checkpoints store its attributes.

    Attributes:
        value: a power of two, so that scaling rounds nothing.
        interval: number of steps without an overflow after which the scale doubles.
        steps: number of such steps since the scale changed.
        skipped: number of all steps that did not update the weights.
    """

    value: float = 2.0**16
    interval: int = 2000
    steps: int = 0
    skipped: int = 0

    def update(self, is_finite: bool) -> None:
        """Change the scale after a step, whose gradients were finite or not."""
        self.steps = self.steps + 1 if is_finite else 0
        if is_finite and self.steps < self.interval:
            return
        before, self.value, self.steps = self.value, self.value * (2 if is_finite else 0.5), 0
        if is_finite:
            return
        self.skipped += 1
        logger.info("no update: gradients overflow float16; loss scale %g -> %g", before, self.value)
        if self.value < 1:
            raise UserError(
                f"gradients overflow float16 with a loss scale of {before:g}; use a lower training.learning_rate than this "
                f"run's, or model.dtype='bfloat16'"
            )


class Float16AdamW(AdamW):
    """`AdamW` with a loss scale, for a wrapped Llama. Its steps need `update_weights` of this module."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self.loss_scale, self.is_divided = LossScale(), False  # whether the gradients are divided by the scale
        if (head := unwrap(model).lm_head) is not None:
            head.compute_chunk = scaled(head.compute_chunk, self.loss_scale)

    def update(self, parameters: list[nn.Parameter]) -> None:
        if not self.is_divided:
            raise UserError(
                "gradients in float16 are multiplied by a loss scale; call update_weights of workbench.variants.choose "
                "instead of clip_grad_norm and step"
            )
        super().update(parameters)


def scaled(compute_chunk: ChunkLoss, scale: LossScale) -> ChunkLoss:
    """Return a `ChunkLoss` whose gradients are those of the loss times the scale."""

    def compute(
        logits: Tensor, targets: Tensor, target_weights: Tensor, shard: VocabularyShard, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        loss, gradient = compute_chunk(logits, targets, target_weights * scale.value, shard, with_gradient)
        return loss / scale.value, gradient

    return compute


@torch.no_grad()
def update_weights(model: Any, optimizer: Float16AdamW, max_norm: float | None) -> Tensor:
    """Clip the gradients and update the weights, see `picotron.optimizer.update_weights`, unless a gradient on any rank
    has overflowed. The norm is then 0.
    """
    scale = optimizer.loss_scale
    norm = clip_grad_norm(model, None) / scale.value
    is_finite = bool(norm.isfinite())
    if is_finite:
        clip = 1.0 if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(model, clip / scale.value)
        optimizer.is_divided = True
        optimizer.step()
        optimizer.is_divided = False
    optimizer.zero_grad()
    scale.update(is_finite)
    return norm if is_finite else torch.zeros_like(norm)
