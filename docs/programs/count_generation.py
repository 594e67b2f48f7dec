"""Work, memory and idle time of generation, counted and by formula:  python -m docs.programs.count_generation

The model is the quickstart's, in float32.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from docs.programs.count import KD, MODEL, Row, show
from docs.programs.quickstart import CPU, quickstart, stage_of
from picotron import process_group_manager as pgm
from picotron.explain.fake_group import fake_rank
from picotron.generation.rotation import Group, Rotation, generating
from picotron.generation.sampling import Sampling
from picotron.schedules.actions import Action
from picotron.schedules.checker import check
from picotron.schedules.generation import generation

PROMPTS, LENGTH = 8, 40  # prompts, and tokens of each


def generate_on_rank(rank: int, new: int, **layout: int) -> tuple[int, int]:
    """Play a rank that generates, and that receives and gathers zeros from others. Returns the number of tokens that
    its last layer computes, and the largest size of its caches in bytes.
    """
    config, tokens, sizes = quickstart(**layout), [0], []

    def count(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        tokens[0] += arguments[0].numel() // MODEL.hidden_size
        sizes.append(sum(group.cache.nbytes for group in groups))

    def zeros(rotation: Rotation, action: Action) -> list[Tensor]:
        return [torch.zeros_like(buffer) for buffer in allocate(rotation, action)]

    allocate, received = Rotation.buffers, mock.patch.object(Rotation, "buffers", zeros)
    gathered = mock.patch.object(Tensor, "new_empty", Tensor.new_zeros)
    silent = mock.patch("torch.distributed.broadcast")
    with fake_rank(rank, config.distributed), silent, received, gathered, torch.no_grad():
        stage, grid = stage_of(config), pgm.process_group_manager
        p, mine = grid.pp_world_size, range(grid.cp_dp_rank, PROMPTS, grid.cp_dp_world_size)
        groups = [Group({n: [n] * LENGTH for n in mine[i::p]}, Sampling(new), 0, CPU) for i in range(p)]
        last: Any = list(stage.module.model.layers.values())[-1]
        last.mlp.register_forward_pre_hook(count)
        with generating(stage):
            Rotation(stage, generation(p, p, 1), groups, new).run()
    return tokens[0], max(sizes)


def tokens_computed() -> Iterator[Row]:
    """Tokens that go through the layers until each of 8 prompts of 40 tokens has some new ones. With a cache, the
    prefill computes 8 x 40, and each further new token 8 more. Without a cache, every new token would need a forward
    pass of all tokens before it.
    """
    yield "", "counted", "8 (40 + new - 1)", "without a cache, 8 new (40 + (new - 1)/2)"
    for new in (1, 8, 32):
        tokens, _ = generate_on_rank(0, new)
        yield f"new = {new}", tokens, PROMPTS * (LENGTH + new - 1), int(PROMPTS * new * (LENGTH + (new - 1) / 2))


def caches() -> Iterator[Row]:
    """Keys and values of 8 sequences of T = 64 tokens on a rank, in KiB. Formula: 2 T K d numbers in each layer for
    each sequence, divided by the number of ranks along each axis: pp ranks hold some of the layers, tp ranks some of
    the heads, dp ranks some of the sequences.
    """
    new = 64 - LENGTH + 1  # the last token is not stored
    yield "", "counted, KiB", "formula, KiB"
    whole = 2 * MODEL.num_hidden_layers * PROMPTS * (LENGTH + new - 1) * KD * 4 / 2**10
    layouts: tuple[dict[str, int], ...] = ({}, {"pp_size": 2}, {"tp_size": 2}, {"dp_size": 2}, {"dp_size": 2, "pp_size": 2, "tp_size": 2})  # fmt: skip
    for layout in layouts:
        name = " ".join(f"{axis.removesuffix('_size')} {size}" for axis, size in layout.items()) or "one process"
        yield name, generate_on_rank(0, new, **layout)[1] / 2**10, whole / 2 ** len(layout)


def idle_times() -> Iterator[Row]:
    """Bubble of p = 4 ranks with some groups of prompts that get 100 tokens each, simulated: every forward of a group
    in a stage takes the same time, and messages take none.
    """
    yield "", "simulated", "1 - groups/p"
    for groups in (1, 2, 4, 8):
        yield f"groups = {groups}", f"{check(generation(4, groups, 100)).bubble:.1%}", f"{max(0, 1 - groups / 4):.1%}"


TABLES = (tokens_computed, caches, idle_times)

if __name__ == "__main__":
    for table in TABLES:
        show(table)
