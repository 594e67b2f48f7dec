"""Pictures of tokens: the row that a loss counts, the columns that a cache keeps, the pair that DPO compares.

python -m docs.programs.token_pictures packed_row --out docs/pictures/packed_row.svg
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from docs.programs.quickstart import quickstart, stage_of
from docs.programs.svg import LINE, RANKS, TENSORS, WIDTH, Svg, main
from picotron.context_parallel.positions import local_positions
from picotron.data.loader import MicroBatches
from picotron.data.rows import Samples, pack_samples
from picotron.data.samples import SampleEncoder
from picotron.data.tokens import train_bpe
from picotron.drawing.draw_svg import COLOURS
from picotron.explain.fake_group import fake_rank
from picotron.generation.kv_cache import KVCache
from picotron.model.llama import IGNORE_INDEX


def packed_row(length: int = 14) -> str:
    """Draw a row of two samples, as the data loader returns it: the keys that each token attends to, and its target."""
    records = [
        {"prompt": "Where is cos?", "completion": " In math."},
        {"prompt": "And seed?", "completion": " random."},
    ]
    tokenizer = train_bpe((text for record in records for text in record.values()), 320)
    encoder = SampleEncoder({"prompt_column": "prompt", "completion_column": "completion"}, tokenizer, np.int64)
    encoded = encoder.encode([sample for record in records for sample in encoder.convert(record)])
    rows = pack_samples(Samples(**encoded), length).training
    batch = MicroBatches(rows, torch.arange(length))[np.array([0]), 1.0]
    bounds = batch["cu_seqlens"].tolist()
    used = bounds[-2]  # the last document is the empty end

    def word(token: int) -> str:
        return "end" if token == tokenizer.eos_token_id else tokenizer.decode([token]).strip()

    left, column, row, top = 98.0, 54, 24, 3 * LINE + 14
    picture, right = Svg(WIDTH, top + length * row + 4), left + length * column
    keys = (TENSORS["activations"], "score that is computed"), (TENSORS["gradients"], "target that the loss counts")
    picture.keys(0, 0, *keys, ("", "not computed, not counted"))
    picture.text(0, LINE + 17, "Row: a query. Column: a key. Number: its position. Last column: the target.")
    for i, token in enumerate(batch["input_ids"][0].tolist()):
        x, y = left + i * column, top + i * row
        name = word(token) if i < used else "-"
        picture.text(x + column / 2, top - 10, name, "centred")
        picture.text(0, y + 17, str(batch["position_ids"][0, i].item()))
        picture.text(22, y + 17, name)
        start = max(bound for bound in bounds if bound <= i)
        picture.frame(left, y, length * column - 3, row - 3)
        for key in range(start, i + 1):
            picture.box(left + key * column, y, column - 3, row - 3, TENSORS["activations"])
        if batch["target_weights"][0, i]:
            target = word(int(batch["target_ids"][0, i]))
            picture.box(right + 8, y, WIDTH - right - 8, row - 3, TENSORS["gradients"], target)
        else:
            picture.frame(right + 8, y, WIDTH - right - 8, row - 3)
    return str(picture)


def kv_cache(prompts: tuple[int, ...] = (5, 3)) -> str:
    """Draw the columns of a cache in each forward pass: computed now, read or hidden by the mask. In the end, the
    first sequence ends.
    """
    cache, size, row, left, passes = KVCache(prompts, 16), 46, 30, 122.0, 4
    picture = Svg(WIDTH, LINE + 8 + passes * (len(prompts) * row + 20) - row)
    keys = (COLOURS["F"], "computed in this pass"), (TENSORS["activations"], "read from the cache")
    picture.keys(0, 0, *keys, ("", "hidden by the mask, or free"))
    for number in range(passes):
        top = LINE + 16 + number * (len(prompts) * row + 20)
        if number == passes - 1:
            cache.keep([1])
        if number:
            cache.append(torch.float32, torch.device("cpu"))
        computed = read = 0
        for i, start in enumerate(cache.starts):
            y = top + i * row
            hidden = [False] * cache.length if cache.mask is None else cache.mask[i, 0, 0].isinf().tolist()
            if not number:
                hidden = [j < start for j in range(cache.length)]
            picture.text(left - 24, y + 20, "ab"[len(prompts) - len(cache.starts) + i])
            picture.frame(left, y, 9 * size - 3, row - 4)
            for j in range(cache.length):
                is_new = not number or j == cache.length - 1
                if not hidden[j]:
                    colour = COLOURS["F"] if is_new else TENSORS["activations"]
                    picture.box(left + j * size, y, size - 3, row - 4, colour, str(j - start))
                    computed, read = computed + is_new, read + (not is_new)
        picture.text(0, top + 20, f"decode {number}" if number else "prefill")
        x = left + 9 * size + 16
        picture.text(x, top + 20, f"{computed} computed, {read} read; without a cache: {computed + read}")
    return str(picture)


def log_ratios(ids: Tensor, targets: Tensor) -> Tensor:
    """Return log(pi / pi_ref) of each target, (B, T), of two models with random weights."""
    found = []
    for seed in (0, 1):
        config = quickstart(seed=seed)
        with fake_rank(0, config.distributed), torch.no_grad():
            model: Any = stage_of(config).module
            found.append(model(ids, loss_fn=lambda head, x: head.log_probs(x, targets)))
    return found[0] - found[1]


def preference(length: int = 16, prompt: int = 4, beta: float = 0.1) -> str:
    """Draw the terms of DPO's margin, coloured by the cp rank that has them, and the loss with and without the sum."""
    ids = torch.randint(1024, (2, length + 1), generator=torch.Generator().manual_seed(3))
    targets = ids[:, 1:].clone()
    targets[:, : prompt - 1] = IGNORE_INDEX
    ratios = beta * log_ratios(ids[:, :-1], targets)
    owner = {int(position): rank for rank in (0, 1) for position in local_positions(length, 2, rank, "zigzag")}
    left, column, row, top, reach = 96.0, 54, 104, 2 * LINE + 4, ratios.abs().max().item()
    picture = Svg(WIDTH, top + 2 * row + 4 * LINE)
    picture.text(
        0, LINE + 17, f"Bar: a token's beta log(p / p_ref), beta = {beta}; upwards: likelier than in the reference."
    )
    picture.keys(
        0, 0, (RANKS[0], "tokens of cp rank 0"), (RANKS[1], "tokens of cp rank 1"), ("", "prompt: not counted")
    )
    parts = [0.0, 0.0]
    for i, (name, sign) in enumerate((("chosen", 1), ("rejected", -1))):
        middle = top + i * row + row / 2
        picture.text(0, middle + 5, name)
        picture.line(left, middle, left + length * column, middle)
        for token, ratio in enumerate(ratios[i].tolist()):
            x, height = left + token * column, abs(ratio) / reach * (row / 2 - 8)
            if targets[i, token] == IGNORE_INDEX:
                picture.frame(x, middle - 10, column - 4, 20)
                continue
            parts[owner[token]] += sign * ratio
            picture.box(
                x, middle - height * (ratio > 0), column - 4, height, RANKS[owner[token]], title=f"{ratio:+.2f}"
            )
    losses = [-F.logsigmoid(torch.tensor(margin)).item() for margin in (*parts, sum(parts))]
    y = top + 2 * row + 16
    for rank, part in enumerate(parts):
        picture.box(left, y + rank * 34, 190, 28, RANKS[rank], f"rank {rank}: {part:+.2f}")
        picture.arrow(left + 196, y + 14 + rank * 34, left + 330, y + 31)
    picture.text(left + 344, y + 12, f"all-reduce: both have the margin {sum(parts):+.2f}")
    picture.text(left + 344, y + 36, f"loss -log sigmoid(margin) = {losses[2]:.2f}", "title")
    picture.text(
        left + 344, y + 60, f"without the sum: ({losses[0]:.2f} + {losses[1]:.2f}) / 2 = {sum(losses[:2]) / 2:.2f}"
    )
    for i, line in enumerate(("chosen -", "rejected")):
        picture.text(0, y + 26 + 20 * i, line)
    return str(picture)


if __name__ == "__main__":
    main(__doc__, packed_row, kv_cache, preference)
