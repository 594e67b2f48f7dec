"""A block of router and experts, forward and backward on one process, compared with that of transformers.

transformers chooses between two forms: `grouped_mm`, its default, and `eager`, a loop over the experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import ON_GPU, TINY, arguments, device_of
from conformance.experts import hub_tensors
from workbench.variants.experts import Experts

TOKENS, HIDDEN = (64, 32) if TINY else (16384, 2048) if ON_GPU else (1024, 512)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SHAPES = ((8, 2, 1408), (64, 8, 256), (128, 8, 192))  # experts, experts of a token, intermediate size


def block_of(config: Qwen3MoeConfig, implementation: str | None) -> nn.Module:
    """Return a block with the same weights for each implementation; None: picotron's."""
    config._experts_implementation = implementation or "eager"
    theirs = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    if implementation is not None:
        return theirs
    ours = Experts(config)
    weights = hub_tensors({f"mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}, is_mixtral=False)
    ours.load_state_dict({name.removeprefix("mlp."): tensor for name, tensor in weights.items()})
    return ours


def step_of(rank: int, shape: tuple[int, int, int], implementation: str | None) -> Callable[[], Any]:
    number, chosen, size = shape
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=size, num_experts=number, num_experts_per_tok=chosen
    )
    block = block_of(config, implementation).to(device_of(rank), DTYPE)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device_of(rank), DTYPE)

    def step() -> Tensor:
        block.zero_grad()
        loss = block(x.clone().requires_grad_()).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    for number, chosen, size in SHAPES:
        shape = (number, chosen, min(size, 16) if TINY else size)
        print(f"\n{number} experts of {shape[2]} hidden units, {chosen} for each of {TOKENS:,} tokens, D = {HIDDEN:,}")
        variants = [
            Variant(name, partial(step_of, shape=shape, implementation=implementation))
            for name, implementation in (
                ("transformers, grouped_mm", "grouped_mm"),
                ("transformers, eager", "eager"),
                ("picotron", None),
            )
        ]
        print_table(measure(variants, options.turns, options.steps), TOKENS, variants[0].name)


if __name__ == "__main__":
    main()
