"""ZeRO-3 of modules that are not a Llama: gradients and updated weights equal those of one process."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conformance.oracle import assert_close, make_config
from conformance.training import full_tensor
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Training
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.data_parallel.zero1 import DataParallelZero1
from picotron.data_parallel.zero3 import DataParallelZero3, Unit
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.process_group_manager import setup_process_group_manager

SIZE, BATCH, STEPS, RANKS = 6, 8, 3, 2
TRAINING: Training = make_config(training__weight_decay=0.3, training__learning_rate=1e-2).training
Result = dict[str, Any]


class Block(nn.Module):
    """A module whose weights are used in two branches: the gradient of `x` is complete before that of `embedding`."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.linear, self.embedding, self.projection = nn.Linear(SIZE, SIZE), nn.Embedding(5, 3), nn.Linear(3, SIZE)
        self.unused = None if nested else nn.Parameter(torch.randn(SIZE))
        self.scale = nn.Parameter(torch.randn(1))
        self.nested = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)) if nested else nn.Identity()
        self.register_buffer("offset", torch.randn(SIZE))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, pair: tuple[Tensor, Tensor], ids: Tensor, *, power: int = 1) -> tuple[tuple[Tensor, Tensor], Any]:
        x, y = pair
        self.calls += 1
        x = self.nested(x) * self.scale  # a weight of the block after a module inside
        branch = self.projection(self.embedding(ids)).tanh()
        return (self.linear(x).tanh() ** power + branch + self.offset, y + x), {"mean": x.mean(-1), "none": None}


class Toy(nn.Module):
    """Blocks that are shared, frozen, unused, run twice or checkpointed, and a root module with parameters. Some
    weights are read while their module does not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(Block(nested=i in (1, 3, 4)) for i in range(6))
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.blocks[1].requires_grad_(False)
        self.blocks[3].linear.requires_grad_(False)
        self.blocks[3].scale.requires_grad_(False)
        self.blocks[4].nested.requires_grad_(False)
        self.matrix = nn.Parameter(torch.randn(SIZE, SIZE))

    def product(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Multiply with a weight of the root module, and with one of a module that is not called."""
        return pair[0] @ self.matrix.cos(), nn.functional.linear(pair[1], self.blocks[4].linear.weight)

    def two_blocks(self, pair: tuple[Tensor, Tensor], ids: Tensor, power: int) -> tuple[tuple[Tensor, Tensor], Any]:
        pair, _ = self.blocks[3](pair, ids, power=power)
        return self.blocks[4](pair, ids, power=power)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Any]:
        pair, means = (self.first(x) * self.scale, x), []
        for i in (0, 1, 2, 3, 1, 3):  # blocks 1, 3 and 4 run twice, block 5 does not run
            if i == 3:
                pair, more = checkpoint(self.two_blocks, pair, ids, power=2, use_reentrant=False)
            else:
                pair, more = self.blocks[i](pair, ids, power=1 + i % 2)
            means.append(more["mean"] * self.scale.sum())
            pair = checkpoint(self.product, pair, use_reentrant=False)
        return {"loss": (pair[0] + pair[1]).square().mean() + torch.stack(means).square().mean()}


class RandomToy(nn.Module):
    """A tree of blocks drawn with a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
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

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        pair, blocks, means = (x * self.head.weight, x), [*self.blocks["a"], *self.blocks["b"]], []
        for i, saves in zip(self.order, self.checkpointed, strict=True):
            if saves:
                pair, more = checkpoint(blocks[i], pair, ids, use_reentrant=False)
            else:
                pair, more = blocks[i](pair, ids)
            means.append(more["mean"])
        return {
            "loss": (self.head(pair[0]) * self.scalar).square().mean()
            + pair[1].mean()
            + torch.stack(means).square().mean()
        }


def toy(seed: int | None = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        return (Toy() if seed is None else RandomToy(seed)).double()


def micro_batches(step: int, rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of the two micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, BATCH, SIZE, generator=generator, dtype=torch.float64)
    ids = torch.randint(5, (2, BATCH), generator=generator)
    return [(a[rank::ranks], b[rank::ranks]) for a, b in zip(x, ids, strict=True)]


def torch_training(model: nn.Module) -> Result:
    """Train with torch's AdamW. Returns the gradients of the first step, the norms, and the weights at the end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": TRAINING.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=TRAINING.learning_rate,
        betas=(TRAINING.adam_beta1, TRAINING.adam_beta2),
        eps=TRAINING.adam_eps,
    )
    norms, gradients = [], {}
    for step in range(STEPS):
        for batch in micro_batches(step):
            (model(*batch)["loss"] / 2).backward()
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # unused: its weight decays in picotron
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        norms.append(nn.utils.clip_grad_norm_(trained, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def trained(wrap: Callable[[nn.Module], DataParallel], model: nn.Module) -> tuple[DataParallel, Result]:
    """Train as picotron does, with an evaluation between the last backward and each update."""
    setup_process_group_manager(1, 1, 1, RANKS)
    grid, buffers = pgm.process_group_manager, dict(model.named_buffers())
    wrapped = wrap(model)
    optimizer = AdamW(wrapped.parameters(), TRAINING, fused=False)
    norms, gradients = [], {}
    for step in range(STEPS):
        batches = micro_batches(step, grid.cp_dp_rank, RANKS)
        for i, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = i == len(batches) - 1
            (wrapped(*batch)["loss"] / len(batches)).backward()
        wrapped.finish_grad_sync()
        with torch.no_grad():
            assert wrapped(*batch)["loss"].isfinite()
        parameters = dict(model.named_parameters())
        gradients = gradients or {n: full_tensor(p, "main_grad") for n, p in parameters.items() if p.requires_grad}
        norms.append(clip_grad_norm(wrapped, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    weights = {name: full_tensor(p, "data") for name, p in model.named_parameters()}
    return wrapped, {"gradients": gradients, "norms": norms, "weights": weights}


def assert_equal(found: Result, expected: Result, what: str = "") -> None:
    assert_close(torch.stack(found["norms"]), torch.stack(expected["norms"]), what=f"{what} norms")
    for kind in ("gradients", "weights"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert_close(found[kind][name], tensor, what=f"{what} {kind} of {name}")


def train_with_engine(engine: str) -> None:
    nested = [each for each in toy().modules() if isinstance(each, Block)]
    assert len(nested) == 6
    wrap: dict[str, Callable[[nn.Module], DataParallel]] = {
        "bucket": DataParallelBucket,
        "zero1": DataParallelZero1,
        "zero3, lists": DataParallelZero3,
        "zero3, nested": lambda model: DataParallelZero3(
            model, [[each] for each in model.modules() if isinstance(each, (Block, nn.Sequential))]
        ),
        "zero3, pairs": lambda model: DataParallelZero3(
            model, [[model.blocks[i], model.blocks[i + 1]] for i in (0, 2, 4)] + [[model.first]]
        ),
    }
    wrapped, result = trained(wrap[engine], toy())
    assert_equal(result, torch_training(toy()), engine)
    if isinstance(wrapped, DataParallelZero3):
        assert all(unit.full.untyped_storage().nbytes() == 0 for unit in wrapped.units)


@pytest.mark.parametrize(
    "engine",
    ["bucket", "zero1", "zero3, lists", "zero3, nested", "zero3, pairs"],
)
def test_a_toy_equals_one_process(pool: WorkerPool, engine: str) -> None:
    pool.run(train_with_engine, RANKS, engine)


def train_random_toys(seeds: list[int]) -> None:
    for seed in seeds:
        model, dice = toy(seed), random.Random(seed)
        units = [[each] for each in model.modules() if isinstance(each, (Block, nn.Sequential)) and dice.random() < 0.7]
        units = dice.choice([None, units])
        _, result = trained(functools.partial(DataParallelZero3, units=units), model)
        assert_equal(result, torch_training(toy(seed)), f"seed {seed}")


def test_random_toys_equal_one_process(pool: WorkerPool) -> None:
    pool.run(train_random_toys, RANKS, list(range(10)))


# ------------------------------------------------------------------------------------------------------ costs, errors


class Chain(nn.Module):
    """Linear layers one after the other, the last of which runs twice."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(depth))
        self.unused = nn.ModuleList([nn.Linear(SIZE, SIZE)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[::-1]:  # not the order in which they are registered
            x = layer(x).tanh()
        return x.square().sum()


def gathers_of_a_chain(depth: int) -> tuple[list[int], int]:
    """Return the numbers of gathered units of each of three micro-batches, and the most full units at a time."""
    setup_process_group_manager(1, 1, 1, RANKS)
    model, most, counts = DataParallelZero3(Chain(depth)), 0, []
    start_gather = Unit.start_gather
    gathered: list[Unit] = []

    def watched(unit: Unit) -> None:
        nonlocal most
        gathered.extend([] if unit.is_full else [unit])
        start_gather(unit)
        most = max(most, sum(each.is_full for each in model.units))

    Unit.start_gather = watched  # type: ignore[method-assign]
    try:
        for _ in range(3):
            gathered.clear()
            model(torch.randn(2, SIZE)).backward()
            counts.append(len(gathered))
        model.finish_grad_sync()
    finally:
        Unit.start_gather = start_gather  # type: ignore[method-assign]
    return counts, most


def test_after_one_micro_batch_only_the_weights_that_are_used_are_gathered(pool: WorkerPool) -> None:
    """In forward, five layers, and in backward, two: the last two are there, and the first one needs no weights."""
    for (first, *later), most in pool.run(gathers_of_a_chain, RANKS, 5):
        assert later == [7, 7]
        assert first <= 7 + 5
        assert most == 2


def gradients_of_two_dtypes() -> None:
    setup_process_group_manager(1, 1, 1, RANKS)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE).double())
    model[0].weight.data = model[0].weight.data.double()  # its bias is in float32
    expected, x = copy.deepcopy(model), torch.ones(2, SIZE, dtype=torch.float64)
    wrapped = DataParallelZero3(model, [])
    assert {unit.full.dtype for unit in wrapped.units} == {torch.float32, torch.float64}

    def output(of: Any) -> Tensor:
        square = torch.view_as_complex(of[0].weight.unflatten(1, (-1, 2))).square()  # autograd saves a complex view
        return of[1](nn.functional.linear(x, torch.view_as_real(square).flatten(1)) + of[0].bias).square().sum()

    expected_output = output(expected)
    expected_output.backward()
    model.forward = lambda x: output(model)  # type: ignore[method-assign]
    wrapped(x).backward()
    wrapped.finish_grad_sync()
    for name, parameter in expected.named_parameters():
        assert_close(full_tensor(model.get_parameter(name), "main_grad"), parameter.grad, what=name)


def test_parameters_of_two_dtypes_form_two_units(pool: WorkerPool) -> None:
    pool.run(gradients_of_two_dtypes, RANKS)


def state_dicts() -> None:
    setup_process_group_manager(1, 1, 1, RANKS)
    module = toy()
    expected = copy.deepcopy(module.state_dict())
    model = DataParallelZero3(module)
    for call, remedy in (
        (model.state_dict, "before state_dict, call gather"),
        (module.blocks[0].state_dict, "before state_dict, call gather"),
        (lambda: module.load_state_dict(expected), "call load_state_dict before the module is wrapped"),
    ):
        with pytest.raises(UserError, match=remedy):
            call()
    for unit in model.units:
        unit.gather()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_state_dict_is_full_or_an_error(pool: WorkerPool) -> None:
    pool.run(state_dicts, RANKS)


def modify_in_place() -> None:
    setup_process_group_manager(1, 1, 1, RANKS)

    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).tanh()
            y.add_(1)
            return y

    with pytest.raises(RuntimeError, match="modified in place"):
        DataParallelZero3(InPlace(SIZE, SIZE))(torch.randn(2, SIZE)).sum().backward()


def test_a_saved_tensor_that_is_modified_in_place_is_an_error(pool: WorkerPool) -> None:
    pool.run(modify_in_place, RANKS)
