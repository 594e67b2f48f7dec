"""ZeRO-3 of modules that are not a Llama: gradients equal those of one process, and what is refused."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Training
from picotron.console import UserError
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.process_group_manager import setup_process_group_manager
from tests.support.oracle import assert_close
from tests.support.training import full_tensor
from workbench.variants.zero3 import DataParallelZero3

SIZE, BATCH, STEPS, RANKS = 6, 8, 2, 2


class Block(nn.Module):
    """A module whose weights are used in two branches: the gradient of `x` is complete before that of `embedding`."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.linear, self.embedding, self.projection = nn.Linear(SIZE, SIZE), nn.Embedding(5, 3), nn.Linear(3, SIZE)
        self.unused = None if nested else nn.Parameter(torch.randn(SIZE))
        self.scale = nn.Parameter(torch.randn(1, dtype=torch.complex128))
        self.nested = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)) if nested else nn.Identity()
        self.register_buffer("offset", torch.randn(SIZE))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, pair: tuple[Tensor, Tensor], ids: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        x, y = pair
        self.calls += 1
        x = (self.nested(x) * self.scale).real  # a weight of the block after a module inside
        branch = self.projection(self.embedding(ids)).tanh()
        return (self.linear(x).tanh() + branch + self.offset, y + x), {"mean": x.mean(-1), "none": None}


class Scaled(nn.Embedding):
    """An embedding that, unlike others, needs a weight in backward."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.randn(sizes[1]))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class Toy(nn.Module):
    """A tree of blocks drawn with a seed, which are shared, frozen, unused, run twice or checkpointed. Weights of no
    unit are read while their module does not run.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        self.columns = nn.Parameter(torch.randperm(SIZE), requires_grad=False)
        blocks = [Block(nested=dice.random() < 0.3) for _ in range(dice.randint(1, 5))]
        for block in blocks:
            other = dice.choice(blocks)
            if dice.random() < 0.3:
                block.projection = other.projection
            if dice.random() < 0.2:
                block.linear.weight = other.linear.weight
            for parameter in block.parameters():
                parameter.requires_grad_(dice.random() > 0.2)
            if dice.random() < 0.2:
                block.requires_grad_(False)
        self.order = [dice.randrange(len(blocks)) for _ in range(dice.randint(1, 6))]
        self.checkpointed = [dice.random() < 0.4 for _ in self.order]
        half = dice.randint(0, len(blocks))
        self.blocks = nn.ModuleDict({"a": nn.ModuleList(blocks[:half]), "b": nn.ModuleList(blocks[half:])})
        self.head, self.scalar = nn.Linear(SIZE, 1), nn.Parameter(torch.randn(()))
        self.other = nn.Linear(SIZE, SIZE)
        rows = nn.Sequential(nn.Embedding(5, SIZE), nn.Linear(SIZE, SIZE))
        self.start = nn.ModuleList([Scaled(5, SIZE), rows])

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        x = x[:, self.columns] + self.start[0](ids) + self.start[1](ids)
        pair, blocks, means = (x * self.head.weight, x), [*self.blocks["a"], *self.blocks["b"]], []
        for i, saves in zip(self.order, self.checkpointed, strict=True):
            if saves:
                pair, more = checkpoint(blocks[i], pair, ids, use_reentrant=False)
            else:
                pair, more = blocks[i](pair=pair, ids=ids)
            means.append(more["mean"])
            pair = pair[0], nn.functional.linear(pair[1], self.other.weight)
        return {
            "loss": (self.head(pair[0]) * self.scalar).square().mean()
            + pair[1].mean()
            + torch.stack(means).square().mean()
        }


def toy(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Toy(seed).double()


def micro_batches(step: int, rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of the two micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, BATCH, SIZE, generator=generator, dtype=torch.float64)
    ids = torch.randint(5, (2, BATCH), generator=generator)
    return [(a[rank::ranks], b[rank::ranks]) for a, b in zip(x, ids, strict=True)]


def torch_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the last step on one process."""
    for batch in micro_batches(STEPS - 1):
        (model(*batch)["loss"] / 2).backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


def gradients(model: nn.Module, units: list[list[nn.Module]] | None) -> dict[str, Tensor]:
    """Return the gradients of the last step. Each step ends with an evaluation, before gradients are read."""
    setup_process_group_manager(1, 1, 1, RANKS)
    wrapped, buffers = DataParallelZero3(model, units), dict(model.named_buffers())
    for step in range(STEPS):
        wrapped.zero_grad()
        batches = micro_batches(step, pgm.process_group_manager.cp_dp_rank, RANKS)
        for i, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = i == len(batches) - 1
            (wrapped(*batch)["loss"] / len(batches)).backward()
        assert clip_grad_norm(wrapped, None).dtype == torch.float64
        with torch.no_grad():
            assert wrapped(*batch)["loss"].isfinite()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(unit.full.untyped_storage().nbytes() == 0 for unit in wrapped.units)
    return {name: full_tensor(p, "main_grad") for name, p in model.named_parameters() if p.requires_grad}


def train_random_toys(seeds: Sequence[int]) -> None:
    for seed in seeds:
        model, dice = toy(seed), random.Random(seed)
        kinds = dice.choice([(Block,), (nn.Sequential,), (Block, nn.Sequential)])  # all blocks, which may share weights
        units = [[each] for each in model.modules() if isinstance(each, kinds)]
        for block in (each for each in model.modules() if isinstance(each, Block) and dice.random() < 0.2):
            block.compile(backend="aot_eager")  # with the block's hooks
        assert_close(gradients(model, dice.choice([None, units])), torch_gradients(toy(seed)), what=f"seed {seed}")


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)])
def test_random_toys_equal_one_process(pool: WorkerPool, seeds: Sequence[int]) -> None:
    pool.run(train_random_toys, RANKS, seeds)


class Uncalled(nn.Module):
    """A list with a member that is not called itself, while its weights are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE), nn.Sequential(nn.Linear(SIZE, 20_000))])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1][0](self.layers[0](x))


class Rows(nn.Embedding):
    """A module that returns its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: len(x)]


def uncalled() -> None:
    setup_process_group_manager(1, 1, 1, RANKS)
    with pytest.raises(UserError, match="returns a part of its weights"):
        DataParallelZero3(nn.Sequential(nn.Sequential(Rows(2, SIZE))))(torch.ones(1, SIZE))
    model = DataParallelZero3(Uncalled())
    with torch.no_grad():
        assert all(model(torch.ones(1, SIZE)).isnan().all() for _ in range(5))


def test_weights_on_their_way_are_nan(pool: WorkerPool) -> None:
    pool.run(uncalled, RANKS)


def state_dicts() -> None:
    setup_process_group_manager(1, 1, 1, RANKS)
    module = toy()
    expected = copy.deepcopy(module.state_dict())
    model = DataParallelZero3(module)
    for call, remedy in (
        (model.state_dict, "before state_dict, call gather"),
        (module.head.state_dict, "before state_dict, call gather"),
        (lambda: module.load_state_dict(expected), "call load_state_dict before the module is wrapped"),
    ):
        with pytest.raises(UserError, match=remedy):
            call()
    for unit in model.units:
        unit.gather()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    torch.nn.init.zeros_(module.head.bias)
    with pytest.raises(UserError, match=r"head\.bias was changed in place"):
        AdamW(model, Training(), fused=False).step()
    model.close()
    model = DataParallelZero3(module)
    AdamW(model, Training(), fused=False).step()
    assert not any(unit.is_full for unit in model.units), "weights from before the update are still in memory"


def test_a_state_dict_is_full_or_an_error(pool: WorkerPool) -> None:
    pool.run(state_dicts, RANKS)
