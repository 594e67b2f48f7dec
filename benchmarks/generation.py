"""Generation, compared with transformers' `generate`, in one process and over two pipeline stages.

python -m benchmarks.generation
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.side_by_side import DifferentResults, Variant, gather, measure, print_table
from benchmarks.workload import (
    ON_GPU,
    SHAPE,
    TINY,
    arguments,
    device_of,
    model_config,
    require_gpus,
    run_config,
    stage_of,
    with_initial_weights,
)
from workbench.generation.rotation import generate
from workbench.generation.sampling import Sampling
from workbench.run.launch import keep_freed_memory

PROMPT, NEW = (16, 8) if TINY else (512, 128) if ON_GPU else (64, 32)  # tokens


def random_prompts(count: int) -> torch.Tensor:
    return torch.randint(SHAPE["vocab_size"], (count, PROMPT), generator=torch.Generator().manual_seed(0))


def transformers_generation(rank: int, prompts: int, temperature: float = 1.0) -> Callable[[], list[list[int]]]:
    """Return a function that continues the prompts with tokens drawn by transformers; 0: with the likeliest tokens."""
    device, ids = device_of(rank), random_prompts(prompts)
    with device:
        model = with_initial_weights(LlamaForCausalLM(model_config()))
    model = model.to(torch.bfloat16 if ON_GPU else torch.float32).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    drawing = {"do_sample": True, "top_k": 0, "temperature": temperature} if temperature else {"do_sample": False}
    options = {**drawing, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids).to(device)}
    return lambda: model.generate(ids.to(device), **options)[:, PROMPT:].tolist()


def picotron_generation(
    rank: int, prompts: int, layout: dict[str, Any], temperature: float = 1.0
) -> Callable[[], list[list[int]]]:
    """Return the same for picotron."""
    if not ON_GPU:
        keep_freed_memory()  # as generate.py does
    config = run_config(layout)
    stage = stage_of(config, device_of(rank), getattr(torch, config.model.dtype))
    ids = random_prompts(prompts).tolist()
    return lambda: [each.tokens for each in generate(stage, ids, Sampling(NEW, temperature))]


def continuations(rank: int, generation: Callable[..., Any], *arguments: Any) -> list[list[int]]:
    return generation(rank, *arguments)()


def check_same_continuations() -> None:
    """Compare the first four of the likeliest tokens. (After a tie, which rounding decides, all tokens differ.)

    Raises:
        DifferentResults: they differ for more than a quarter of the prompts.
    """
    theirs = gather(continuations, 1, transformers_generation, 8, 0.0)[0]
    for pp_size in (1, 2):
        ours = gather(continuations, pp_size, picotron_generation, 8, {"pp_size": pp_size}, 0.0)[0]
        same = sum(a[:4] == b[:4] for a, b in zip(theirs, ours, strict=True))
        if same < 6:
            raise DifferentResults(f"picotron, pp {pp_size}: {same} of 8 continuations equal those of transformers")


def step_of(rank: int, generation: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """Return a function that generates, and has no loss to return."""
    generate_all = generation(rank, *arguments)

    def step() -> None:
        generate_all()

    return step


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    require_gpus(2)
    check_same_continuations()
    for prompts in (8, 32):
        baseline = f"transformers, {prompts} prompts"
        variants = [
            Variant(baseline, step_of, (transformers_generation, prompts)),
            Variant("picotron", step_of, (picotron_generation, prompts, {})),
            Variant("picotron, pp 2", step_of, (picotron_generation, prompts, {"pp_size": 2}), processes=2),
        ]
        print_table(measure(variants, options.turns, options.steps), prompts * NEW, baseline)


if __name__ == "__main__":
    main()
