"""Fine-tuning samples packed into rows, compared with a row per sample, in tokens of samples per second.

python -m benchmarks.packing
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.side_by_side import Variant, measure, print_markdown
from benchmarks.workload import (
    MICRO_BATCH,
    MICRO_BATCHES,
    ON_GPU,
    SEQ_LENGTH,
    SHAPE,
    TINY,
    arguments,
    device_of,
    model_config,
    picotron_step,
    run_config,
    torch_adamw,
)
from docs.programs.python_pairs import all_pairs
from picotron.data.loader import micro_batch_samples
from picotron.data.rows import Samples
from picotron.data.samples import SampleRows, pack_samples

BYTES_PER_TOKEN = 2
SAMPLES = 2 * MICRO_BATCH  # in a micro-batch of transformers


@functools.cache
def python_samples() -> Samples:
    """Return samples of random tokens with the lengths of the pairs of docs/programs/python_pairs.py."""
    generator = np.random.default_rng(0)
    if TINY:
        lengths = generator.integers(2, 12, size=(100, 2))
    else:
        sizes = [(len(pair["prompt"]), len(pair["completion"])) for pair in all_pairs()]
        lengths = np.array(sizes) // BYTES_PER_TOKEN + 2
    tokens = generator.integers(SHAPE["vocab_size"], size=lengths.sum()).astype(np.uint16)
    counted = np.tile(np.array([0, 1], np.uint8), len(lengths)).repeat(lengths.ravel())
    return Samples(tokens, counted, lengths.sum(1))


def one_sample_per_row(samples: Samples) -> SampleRows:
    starts, sizes = np.cumsum(samples.lengths) - samples.lengths, np.minimum(samples.lengths - 1, SEQ_LENGTH)
    return SampleRows(samples, starts, sizes, np.ones_like(sizes), np.arange(len(sizes)), SEQ_LENGTH)


def rows_of(packed: bool) -> SampleRows:
    samples = python_samples()
    return pack_samples(samples, SEQ_LENGTH).rows if packed else one_sample_per_row(samples)


def padded_micro_batches(samples: int) -> Iterator[np.ndarray]:
    """Yield the numbers of the samples in each of transformers' micro-batches, endlessly."""
    order = np.random.default_rng(0).permutation(samples)
    for first in itertools.count(0, SAMPLES):
        yield order.take(range(first, first + SAMPLES), mode="wrap")


def transformers_tokens(samples: Samples) -> Iterator[int]:
    """Yield the number of tokens of samples in each micro-batch of transformers."""
    for numbers in padded_micro_batches(len(samples.lengths)):
        yield np.minimum(samples.lengths[numbers], SEQ_LENGTH).sum()


def picotron_tokens(rows: SampleRows) -> Iterator[int]:
    """Yield the number of tokens of samples in each micro-batch of picotron's data loader."""
    tokens = np.add.reduceat(rows.sizes, rows.first[:-1])
    first_step = np.arange(MICRO_BATCHES * MICRO_BATCH).reshape(MICRO_BATCHES, 1, MICRO_BATCH)
    for numbers, _ in micro_batch_samples(rows, first_step, 0, 1, run_config({}).training.seed):
        yield tokens[numbers].sum()


def transformers_step(rank: int) -> Callable[[], Any]:
    """Return a step of transformers' model, with micro-batches padded to their longest sample."""
    device, samples = device_of(rank), python_samples()
    model = LlamaForCausalLM(model_config()).to(device)
    optimizer = torch_adamw(list(model.parameters()))
    starts = np.cumsum(samples.lengths) - samples.lengths
    micro_batches = padded_micro_batches(len(starts))

    def micro_batch() -> dict[str, torch.Tensor]:
        numbers = next(micro_batches)
        lengths = np.minimum(samples.lengths[numbers], SEQ_LENGTH)
        ids, labels = np.zeros((SAMPLES, lengths.max()), np.int64), np.full((SAMPLES, lengths.max()), -100)
        for row, (start, length) in enumerate(zip(starts[numbers], lengths, strict=True)):
            sample = slice(start, start + length)
            ids[row, :length] = samples.tokens[sample]
            labels[row, :length] = np.where(samples.counted[sample], ids[row, :length], -100)
        mask = np.arange(lengths.max()) < lengths[:, None]
        arrays = {"input_ids": ids, "labels": labels, "attention_mask": mask.astype(np.int64)}
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            with torch.autocast("cuda", torch.bfloat16, enabled=ON_GPU):
                loss = model(**micro_batch(), use_cache=False).loss / MICRO_BATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    samples, packed, padded = python_samples(), rows_of(True), rows_of(False)
    tokens = {  # of samples in each micro-batch: they differ by a factor of two, and the time with them
        "transformers, padded to the longest of the micro-batch": transformers_tokens(samples),
        "picotron, a sample per row": picotron_tokens(padded),
        "picotron, packed": picotron_tokens(packed),
    }
    names = list(tokens)
    variants = [
        Variant(names[0], transformers_step),
        Variant(names[1], functools.partial(picotron_step, rows=padded), ({},)),
        Variant(names[2], functools.partial(picotron_step, rows=packed), ({},)),
    ]
    results = measure(variants, options.turns, options.steps)
    table = [["", "tokens of samples per step", "tokens of samples/s", "relative speed", "peak memory, MiB"]]
    contents, rates = {}, {}
    for name in names:
        turns = [sum(itertools.islice(tokens[name], options.steps * MICRO_BATCHES)) for _ in range(options.turns + 1)]
        contents[name] = [turn / options.steps for turn in turns[1:]]  # the first turn is a warm-up
        rates[name] = [each / seconds for each, seconds in zip(contents[name], results[name].seconds, strict=True)]
    for name in names:
        speed = statistics.median(a / b for a, b in zip(rates[name], rates[names[0]], strict=True))
        content, rate, memory = statistics.mean(contents[name]), statistics.median(rates[name]), results[name].memory
        table.append([name, f"{content:,.0f}", f"{rate:,.0f}", f"{speed:.2f}", f"{memory:,.0f}"])
    filled = packed.sizes.sum() / (len(packed) * SEQ_LENGTH)
    print(f"{len(samples.lengths):,} samples of {samples.lengths.mean():.0f} tokens on average", end="; ")
    print(f"packed, {1 - filled:.1%} of a row of {SEQ_LENGTH} is empty")
    print_markdown(table)


if __name__ == "__main__":
    main()
