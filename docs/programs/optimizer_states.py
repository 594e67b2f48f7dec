"""Numbers for docs/optimizer_states.md:

python -m docs.programs.optimizer_states bits
python -m docs.programs.optimizer_states losses
"""

import argparse
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.config import Model
from picotron.data_parallel.data_parallel import DataParallelNaive
from picotron.model.llama import Llama
from picotron.model.weights import initial_weights, materialise
from picotron.optimizer import make_scheduler, update_weights
from picotron.process_group_manager import setup_process_group_manager
from workbench.console import print_line, text_table
from workbench.run.config_reader import parse_config
from workbench.run.model_config import load_model_config
from workbench.variants import bfloat16_states
from workbench.variants.bfloat16_states import Elements, random_bits, round_stochastically
from workbench.variants.choose import make_optimizer

CPU, ROWS, COLUMNS = torch.device("cpu"), 64, 48
PLACES = {  # of two ranks: what each holds of a matrix (ROWS, COLUMNS), and the numbers of these elements
    "dp, replicas": [(slice(None), slice(None), Elements("w", columns=COLUMNS))] * 2,
    "ZeRO-1, slices": [
        (slice(0, 32), slice(None), Elements("w", columns=COLUMNS)),
        (slice(32, 64), slice(None), Elements("w", offset=32 * COLUMNS, columns=COLUMNS)),
    ],
    "tp, columns": [
        (slice(None), slice(0, 24), Elements("w", columns=24, skipped=24)),
        (slice(None), slice(24, 48), Elements("w", first=24, columns=24, skipped=24)),
    ],
}
STATES = {"float32": "float32", "bfloat16_moments": "bfloat16_moments", "bfloat16": "bfloat16", "nearest": "bfloat16"}


def hashed(rank: int, elements: Elements, count: int) -> Tensor:
    return random_bits(elements.numbers(0, count, CPU), torch.tensor(elements.keys(1, 1), dtype=torch.int32))


def generated(seed_of: Callable[[int], int]) -> Callable[[int, Elements, int], Tensor]:
    """Return random bits of a generator that each rank seeds, and calls for its own elements."""

    def bits(rank: int, elements: Elements, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(rank))
        return torch.randint(2**31, (count,), generator=generator, dtype=torch.int32)

    return bits


SOURCES = {
    "hash of the element": hashed,
    "generator, one seed": generated(lambda rank: 0),
    "generator, a seed per rank": generated(lambda rank: rank),
}


def print_bits() -> None:
    """Print how many weights two ranks round otherwise than one process does."""
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    rows = [["random bits", *PLACES]]
    for source, bits in SOURCES.items():

        def rounded(part: Tensor, rank: int, elements: Elements, bits: Any = bits) -> Tensor:
            target = torch.empty_like(part, dtype=torch.bfloat16)
            round_stochastically(target, part, bits(rank, elements, part.numel()).view_as(part))
            return target

        whole = rounded(values, 0, Elements("w", columns=COLUMNS))
        rows.append([source])
        for parts in PLACES.values():
            different = [
                (rounded(values[i, j].contiguous(), rank, elements) != whole[i, j]).sum().item()
                for rank, (i, j, elements) in enumerate(parts)
            ]
            rows[-1].append(" + ".join(map(str, different)))
    print_line(text_table(rows, first_number=1))


def held_out_loss(kind: str, rate: float, seed: int) -> float:
    """Train a tiny Llama on bytes of Python's standard library for 200 steps. Returns its loss on others."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    torch.set_num_threads(1)
    data, length = torch.frombuffer(bytearray(sources[:4_000_000]), dtype=torch.uint8).long(), 128
    model_config = load_model_config(Model(name="template/tiny-llama", num_hidden_layers=2))
    model_config.vocab_size, model_config.pad_token_id = 256, None
    model_config.hidden_size, model_config.head_dim, model_config.intermediate_size = (
        64,
        64 // model_config.num_attention_heads,
        176,
    )
    training = {"optimizer_states": STATES[kind], "learning_rate": rate, "seed": seed, "total_train_steps": 200}
    training |= {"warmup_steps": 20, "seq_length": length, "micro_batch_size": 4}
    sections = {"model": {"name": "template/tiny-llama", "dtype": "bfloat16"}, "dataset": {"name": "python-stdlib"}}
    config = parse_config(sections | {"training": training, "distributed": {"use_cpu": True}})
    with torch.device("meta"):
        llama = Llama(model_config).bfloat16()
    materialise(llama, CPU, initial_weights(model_config, seed))
    model = DataParallelNaive(llama)
    optimizer = make_optimizer(model, config)
    scheduler, generator = make_scheduler(optimizer, config.training), torch.Generator().manual_seed(seed)

    def loss_of(starts: Tensor) -> Tensor:
        rows = data[starts[:, None] + torch.arange(length + 1)]
        loss: Tensor = model(input_ids=rows[:, :-1], target_ids=rows[:, 1:])
        return loss

    for _ in range(200):
        loss_of(torch.randint(3_900_000, (4,), generator=generator)).backward()
        update_weights(model, optimizer, config.training.max_grad_norm)
        scheduler.step()
    with torch.no_grad():
        return loss_of(torch.arange(3_900_000, 3_933_000, length + 1)).item()


def round_to_nearest(target: Tensor, values: Tensor, bits: Tensor) -> None:
    target.copy_(values)


def print_losses() -> None:
    """Print the losses for two learning rates and three seeds."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    setup_process_group_manager(1, 1, 1, 1)
    rows = [["learning rate", "seed", *STATES]]
    for rate in (5e-3, 5e-4):
        found = []
        for seed in (1, 2, 3):
            losses = []
            for kind in STATES:
                patch = mock.patch.object(bfloat16_states, "round_stochastically", round_to_nearest)
                if kind == "nearest":
                    with patch:
                        losses.append(held_out_loss(kind, rate, seed))
                else:
                    losses.append(held_out_loss(kind, rate, seed))
            found.append(losses)
            rows.append([f"{rate:g}", str(seed), *(f"{loss:.4f}" for loss in losses)])
        means = [statistics.mean(each) for each in zip(*found, strict=True)]
        rows.append([f"{rate:g}", "mean", *(f"{mean:.4f}" for mean in means)])
    print_line(text_table(rows, first_number=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print numbers for docs/optimizer_states.md.")
    parser.add_argument("what", choices=("bits", "losses"))
    {"bits": print_bits, "losses": print_losses}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
