"""Generation of text in any layout: groups of prompts rotate through the stages of a pipeline.

The next token of a sequence depends on the one before, so a single group of sequences would keep one stage busy at a
time. So the prompts of a pipeline form as many groups as it has ranks. (With fewer prompts, some groups are empty, and
cost nothing.) In every tick, each rank computes a different group (see `GenerationSchedule.ticks`), sends the result to
the next rank and receives another group from the previous one. For 3 ranks, whose groups are F0, F1 and F2:

    pp 0    F0 F1 F2 F0 F1 F2 F0
    pp 1    .. F0 F1 F2 F0 F1 F2      the last rank draws the next tokens of a group, and sends them to the first one
    pp 2    .. .. F0 F1 F2 F0 F1

In the first round of a group (prefill), its prompts are the documents of one row; sequences with the same prompt share
a document. In every later one (decode), the group has a row for each sequence, with its newest token, and each rank
keeps the keys and values of its layers in a `KVCache`.

With the hidden states, the newest tokens travel from rank to rank. Where a sequence has ended, ENDED is in their place,
so every rank knows what is left of the group without asking the others.

Data-parallel and context-parallel ranks generate for different prompts.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from picotron import process_group_manager as pgm
from picotron.collectives import accumulation_dtype
from picotron.console import UserError
from picotron.model.placement import placement
from workbench.generation.kv_cache import KVCache
from workbench.generation.sampling import Sampling, draw, mask_logits
from workbench.pipelines.modules import LlamaStages
from workbench.pipelines.recorder import record_action
from workbench.run.model_config import check_window
from workbench.schedules.actions import Action
from workbench.schedules.generation import GenerationSchedule, generation

ENDED = -1  # in place of a token


class Completion(NamedTuple):
    """The continuation of a prompt: its tokens, the last of which is an end token if one was drawn, and the logarithm
    of the model's probability of each. (`Sampling` changes how tokens are drawn, but not these numbers, which are those
    of `Head.log_probs`.)
    """

    tokens: list[int]
    log_probs: list[float]


@torch.no_grad()
def generate(
    model: LlamaStages,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    first: int = 0,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Continue prompts. Every rank of the layout calls this with the same arguments.

    Args:
        model: this rank's stages, with weights.
        prompts: tokens of each prompt.
        first: number of the first prompt. With N = `num_return_sequences`, the completions of prompt i have the numbers
            from i N to i N + N - 1. The draws of a completion depend on its number and on the seed, and neither on the
            other prompts nor on the layout.
        on_token: function of the position of a completion in the returned list and its newest token, called when this
            rank reads the token to compute the next one: for each token except the last of a completion.

    Returns:
        The completions of each prompt, one prompt after the other, on every rank.

    Raises:
        UserError: a prompt is empty or too long, or has a token that is not in the vocabulary, see `check_prompt`;
            weights are not in memory (zero3); experts are on several ranks; the stages are placed in a V with an odd
            number of chunks; logits are NaN or infinite; or no token is left to draw, see `mask_logits`.
    """
    _check(model, prompts, sampling)
    prompts = [prompt for prompt in prompts for _ in range(sampling.num_return_sequences)]
    first *= sampling.num_return_sequences
    grid, plan = pgm.process_group_manager, model.plan.schedule
    schedule = generation(plan.pp, plan.pp, 1, plan.chunks, plan.placement)
    device = next(model.parameters()).device
    mine = range(grid.cp_dp_rank, len(prompts) if sampling.max_new_tokens else 0, grid.cp_dp_world_size)
    groups = [
        Group({n: prompts[n] for n in mine[i :: plan.pp]}, sampling, first, device, on_token) for i in range(plan.pp)
    ]
    with generating(model):
        Rotation(model, schedule, groups, sampling.max_new_tokens).run()

    is_source = grid.tp_rank == 0 and schedule.num_stages - 1 in model.stages
    everyone: list[Any] = [None] * grid.world_size
    dist.all_gather_object(everyone, [row for group in groups for row in group.rows()] if is_source else [])
    completions = [Completion([], []) for _ in prompts]
    for number, token, log_prob in (row for rows in everyone for row in rows):
        completions[number].tokens.append(token)
        completions[number].log_probs.append(log_prob)
    return completions


class Group:
    """Sequences that go through the stages together, as one rank knows them.

    Args:
        prompts: tokens of the prompt of each sequence, by the sequence's number.
        sampling, first, on_token: see `generate`.

    Attributes:
        numbers: sequences that have not ended.
        sequences: tokens of each of them so far, with the prompt.
        cache_rows: row of each of them in the cache. In the prefill, those with equal prompts share a row.
        inputs: arguments of the model in the current round.
        drawn: on the rank with the last stage, the numbers, tokens and log-probabilities of each round.
    """

    def __init__(
        self,
        prompts: dict[int, Sequence[int]],
        sampling: Sampling,
        first: int,
        device: torch.device,
        on_token: Callable[[int, int], None] | None = None,
    ) -> None:
        self.sampling, self.device, self.on_token = sampling, device, on_token
        self.numbers, self.sequences = list(prompts), [list(prompt) for prompt in prompts.values()]
        rows: dict[tuple[int, ...], int] = {}
        self.cache_rows = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts.values()]
        self.streams = {number: random.Random(f"{sampling.seed} {first + number}") for number in prompts}
        self.ends = self._integers(list(sampling.ends))
        self.drawn: list[tuple[list[int], Tensor, Tensor]] = []
        lengths = [len(prompt) for prompt in rows]
        self.cache = KVCache(lengths, max(lengths, default=1) + sampling.max_new_tokens - 1)
        boundaries = [0, *accumulate(lengths)]
        positions = [position for length in lengths for position in range(length)]
        self.inputs = {
            "input_ids": self._integers([token for prompt in rows for token in prompt])[None],
            "position_ids": self._integers(positions)[None],
            "cu_seqlens": torch.tensor(boundaries, dtype=torch.int32),
        }
        self.last = self._integers([boundaries[row + 1] - 1 for row in self.cache_rows])  # last tokens of the prompts

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def append(self, tokens: Tensor, dtype: torch.dtype) -> None:
        """Append the newest token (b,) to each sequence, and drop those that have ended."""
        newest = tokens.tolist()
        rows = [row for row, token in enumerate(newest) if token != ENDED]
        cache_rows = [self.cache_rows[row] for row in rows]
        if cache_rows != list(range(len(self.cache.starts))):
            self.cache.keep(cache_rows)
        self.cache_rows = list(range(len(rows)))
        self.numbers, self.sequences = [self.numbers[row] for row in rows], [self.sequences[row] for row in rows]
        for number, sequence, row in zip(self.numbers, self.sequences, rows, strict=True):
            sequence.append(newest[row])
            if self.on_token:
                self.on_token(number, newest[row])
        self.cache.append(dtype, self.device)
        self.inputs = {
            "input_ids": self._integers([newest[row] for row in rows])[:, None],
            "position_ids": self._integers([len(sequence) - 1 for sequence in self.sequences])[:, None],
        }

    def finish(self) -> None:
        """Drop all sequences, and free their memory."""
        self.numbers, self.sequences = [], []
        self.cache.keep([])

    def draw(self, head: Any, x: Tensor) -> Tensor:
        """Draw the next token of each sequence from the head's input, (1, N, D) or (b, 1, D) -> (b,)."""
        grid = pgm.process_group_manager
        logits = head(x[:, self.last] if "cu_seqlens" in self.inputs else x.transpose(0, 1))[0]  # (b, V)
        log_probs = logits.to(accumulation_dtype(logits)).log_softmax(-1)
        if log_probs.isnan().any():
            raise UserError(
                f"the model computes logits of NaN or infinity, so its weights are damaged, or too large for {logits.dtype}; "
                f"use other weights"
            )
        uniform = [self.streams[number].random() for number in self.numbers]
        logits = mask_logits(logits, self.sampling, self.sequences, len(self.drawn))
        tokens = draw(logits, self.sampling, torch.tensor(uniform, dtype=torch.float64, device=self.device))
        if grid.tp_world_size > 1:  # cumulative sums may round differently on each GPU
            dist.broadcast(tokens, grid.tp_group_ids[0], grid.tp_group)
        self.drawn.append((self.numbers, tokens, log_probs.gather(1, tokens[:, None])[:, 0]))
        full = [len(sequence) + 1 == self.sampling.max_length for sequence in self.sequences]
        ended = torch.isin(tokens, self.ends) | torch.tensor(full, device=self.device)
        return tokens.masked_fill(ended, ENDED)

    def rows(self) -> Iterator[tuple[int, int, float]]:
        """Yield (number of the sequence, token, log-probability) of all tokens drawn, in order."""
        for numbers, tokens, log_probs in self.drawn:
            yield from zip(numbers, tokens.tolist(), log_probs.tolist(), strict=True)


class Rotation:
    """The rounds of all groups on one rank, see the top of this file.

    Args:
        rounds: maximum number of rounds of a group.
    """

    def __init__(self, model: LlamaStages, schedule: GenerationSchedule, groups: list[Group], rounds: int) -> None:
        self.model, self.schedule, self.groups, self.rounds = model, schedule, groups, rounds
        self.hidden_size, self.dtype = model.module.config.hidden_size, next(model.parameters()).dtype

    def run(self) -> None:
        """Run until all sequences have ended, or have as many tokens as there are rounds."""
        ticks = self.schedule.ticks(pgm.process_group_manager.pp_rank)
        action, received = next(ticks), list[Tensor]()
        while any(group.numbers for group in self.groups):
            result = self.compute(action, received) if self.is_due(action) else []
            upcoming = next(ticks)
            received = self.exchange(action, result, upcoming)
            action = upcoming

    def round_of(self, action: Action) -> tuple[int, Group]:
        number, group = divmod(action.micro_batch, len(self.groups))
        return number, self.groups[group]

    def is_due(self, action: Action | None) -> TypeGuard[Action]:
        """Whether there is an action to run, and its group has not ended before it."""
        if action is None:
            return False
        number, group = self.round_of(action)
        return number < self.rounds and bool(group.numbers)

    def has_tokens(self, stage: int, number: int) -> bool:
        """Whether a stage gets the newest tokens of a group: the first stage of each rank does, after the prefill."""
        return number > 0 and stage < self.schedule.pp

    def compute(self, action: Action, received: list[Tensor]) -> list[Tensor]:
        """Run a stage, unless all sequences have ended. Returns the message for the next stage: the newest tokens (b,),
        if it needs them, and the hidden states (N, D) or (b, D).
        """
        (number, group), stage = self.round_of(action), action.stage
        last, tokens, y = stage == self.schedule.num_stages - 1, None, None
        if self.has_tokens(stage, number):
            tokens, *received = received
            group.append(tokens, self.dtype)
        if group.numbers:
            shape = group.inputs["input_ids"].shape  # (1, N) or (b, 1)
            x = received[0][: shape.numel()].view(*shape, -1) if received else None
            attend = group.cache.attention(self.model.stages[stage].layers)
            with record_action(str(action)):
                y = self.model(**group.inputs, hidden_states=x, stage=stage, attention_fn=attend, loss_fn=group.draw)
        if number == self.rounds - 1 and stage == max(self.model.stages):
            group.finish()
        if last:
            return [y] if y is not None and number + 1 < self.rounds else []
        if not self.has_tokens(stage + 1, number):
            return [] if y is None else [y.flatten(0, 1)]
        assert tokens is not None
        hidden = torch.zeros(len(tokens), self.hidden_size, dtype=self.dtype, device=tokens.device)
        if y is not None:  # the receiver does not know yet how many sequences are left
            hidden[: len(y)] = y[:, 0]
        return [tokens, hidden]

    def exchange(self, action: Action | None, result: list[Tensor], upcoming: Action | None) -> list[Tensor]:
        """Send the result of an action, and receive the input of the next one, which another rank computes in this
        tick.

        Both are in one batch. If every rank first sent and then received, all could wait forever for each other.
        """
        grid, batch, received = pgm.process_group_manager, list[dist.P2POp](), list[Tensor]()
        if self.is_due(upcoming) and (source := self.schedule.source(upcoming)) is not None:
            if source == action:
                return result
            received = self.buffers(upcoming)
            peer = grid.pp_group_ids[self.schedule.rank_of(source.stage)]
            batch += [dist.P2POp(dist.irecv, each, peer, grid.pp_group) for each in received]
        if action is not None and result:
            peer = grid.pp_group_ids[self.schedule.rank_of((action.stage + 1) % self.schedule.num_stages)]
            batch += [dist.P2POp(dist.isend, each.contiguous(), peer, grid.pp_group) for each in result]
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
        return received

    def buffers(self, action: Action) -> list[Tensor]:
        """Allocate memory for the message that an action needs, see `compute`."""
        (number, group), stage = self.round_of(action), action.stage
        buffers = []
        rows = len(group.numbers) if number else group.inputs["input_ids"].numel()
        if self.has_tokens(stage, number):
            buffers.append(torch.empty(rows, dtype=torch.int64, device=group.device))
        if stage > 0:
            buffers.append(torch.empty(rows, self.hidden_size, dtype=self.dtype, device=group.device))
        return buffers


@contextlib.contextmanager
def generating(model: LlamaStages) -> Iterator[None]:
    """Prepare a model for `Rotation`, and restore it at the end: sequence parallelism and torch.compile are off,
    because one token cannot be divided, and because every length would be compiled.
    """
    sharded: list[Any] = [each for each in model.modules() if getattr(each, "sequence_parallel", False)]
    for module in sharded:
        module.sequence_parallel = False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in sharded:
            module.sequence_parallel = True


def check_prompt(name: str, prompt: Sequence[int], config: PreTrainedConfig, sampling: Sampling) -> None:
    """Raise a UserError unless a prompt has tokens, all of them are in the vocabulary, `max_length` leaves room for new
    ones, and the text stays within the model's sliding window.
    """
    if not len(prompt):
        raise UserError(f"{name} has no tokens; give it at least one, such as that of a new document")
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        raise UserError(
            f"{name} has a token that is not in the vocabulary of {config.vocab_size:,} tokens; use the model's own "
            f"tokenizer"
        )
    if sampling.max_length is not None and len(prompt) >= sampling.max_length:
        raise UserError(
            f"{name} has {len(prompt):,} tokens, but texts end at {sampling.max_length:,} tokens; use a shorter one"
        )
    read = max(len(prompt), sampling.length(len(prompt)) - 1)  # the model does not read the last token
    check_window(config, read, f"{name} of {len(prompt)} tokens, with max_new_tokens={sampling.max_new_tokens},")


def _check(model: LlamaStages, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    for number, prompt in enumerate(prompts):
        check_prompt(f"prompts[{number}]", prompt, model.module.config, sampling)
    if any(parameter.untyped_storage().nbytes() < parameter.nbytes for parameter in model.parameters()):
        raise UserError(
            "the weights of this rank are not in memory, because dp_engine='zero3' divides them; use another dp_engine "
            "to generate"
        )
    if any(placement(parameter).average_over for parameter in model.parameters()):
        raise UserError(
            "the experts of this model are split over ranks, which would wait for each other's prompts; generate with ep_size=1"
        )
