"""A T5 in a pipeline of any schedule:  torchrun --nproc_per_node 2 -m examples.encoder_decoder --schedule zbv

An encoder reads the source, and a decoder, whose layers attend to the encoder's output, writes the target (T5, Raffel
et al. 2020, arXiv:1910.10683, without dropout). Their layers, here four in each half, form the stages:

    stage      0              1               2                  3
    layers     encoder 0, 1   encoder 2, 3    decoder 0, 1       decoder 2, 3
    receives   tokens         hidden states   encoder's output   encoder's output and hidden states

So the encoder's output passes through the stages of the decoder, and each of them adds its part to the gradient that
returns. Three matrices are tied: the embedding, which is also the head, and the position biases of each half, which all
its layers share. Every stage that uses one of these matrices has a replica.

The toy task is to sort numbers. Parameters have the names of transformers' T5ForConditionalGeneration, which also draws
their initial values.
"""

import functools
import math
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.model.cross_entropy import IGNORE_INDEX
from picotron.optimizer import AdamW, make_scheduler, update_weights
from picotron.process_group_manager import setup_process_group_manager
from workbench.console import Parser, number, print_line
from workbench.pipelines.engine import BatchList
from workbench.pipelines.executor import Executor
from workbench.pipelines.modules import Message, Pipeline
from workbench.run.config_reader import parse_config
from workbench.run.launch import exit_on_error, init_process_group, set_up_device
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import SCHEDULES, build, forward_only

PAD, END, FIRST_NUMBER, NUMBERS = 0, 1, 2, 30  # tokens; PAD also begins the decoder's input
SHORTEST, LONGEST = 5, 10  # sources
HELD_OUT = 8  # global batches

Measure = Callable[[Tensor, Tensor], Tensor]
"""`measure(logits, target)` returns a scalar for a micro-batch, such as the loss, from (B, T, V) and (B, T)"""


class Attention(nn.Module):
    """Attention of heads of size d. Scores are not divided by sqrt(d); T5's initial weights are smaller instead."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.heads, size = config.num_heads, config.num_heads * config.d_kv
        self.q, self.k, self.v = (nn.Linear(config.d_model, size, bias=False) for _ in range(3))
        self.o = nn.Linear(size, config.d_model, bias=False)

    def forward(self, x: Tensor, keys: Tensor | None, mask: Tensor) -> Tensor:
        """Attend from x (B, T, D) to `keys` (B, S, D), by default x. `mask` is that of torch's attention."""
        keys = x if keys is None else keys
        pairs = (self.q, x), (self.k, keys), (self.v, keys)
        q, k, v = (linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear, y in pairs)
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)  # (B, heads, T, d)
        return self.o(y.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """x + f(norm(x), ...), where f is a module with its name in transformers."""

    def __init__(self, config: T5Config, name: str, function: nn.Module) -> None:
        super().__init__()
        self.layer_norm, self.name = nn.RMSNorm(config.d_model, config.layer_norm_epsilon), name
        self.add_module(name, function)

    def forward(self, x: Tensor, *arguments: Tensor | None) -> Tensor:
        return x + self.get_submodule(self.name)(self.layer_norm(x), *arguments)


class Block(nn.Module):
    """A layer of the encoder, or of the decoder, which also attends to the encoder's output."""

    def __init__(self, config: T5Config, is_decoder: bool) -> None:
        super().__init__()
        up, down = nn.Linear(config.d_model, config.d_ff, False), nn.Linear(config.d_ff, config.d_model, False)
        functions: dict[str, nn.Module] = {"SelfAttention": Attention(config)}
        functions |= {"EncDecAttention": Attention(config)} if is_decoder else {}
        functions |= {"DenseReluDense": nn.Sequential(OrderedDict(wi=up, relu=nn.ReLU(), wo=down))}
        self.layer = nn.ModuleList(Residual(config, name, function) for name, function in functions.items())

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None, memory_mask: Tensor) -> Tensor:
        x = self.layer[0](x, None, mask)
        if memory is not None:
            x = self.layer[1](x, memory, memory_mask)
        return self.layer[-1](x)


class Half(nn.Module):
    """The layers of the encoder or of the decoder in a stage, and a replica of the position biases of that half."""

    def __init__(self, config: T5Config, layers: range, is_decoder: bool) -> None:
        super().__init__()
        self.config, self.is_decoder = config, is_decoder
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.block = nn.ModuleDict({str(i): Block(config, is_decoder) for i in layers})
        is_end = layers.stop == (config.num_decoder_layers if is_decoder else config.num_layers)
        self.final_layer_norm = nn.RMSNorm(config.d_model, config.layer_norm_epsilon) if is_end else nn.Identity()

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the rows of `relative_attention_bias` for distances, key minus query. Each small distance has a row;
        larger ones share rows, which grow as their logarithm. In the encoder, keys after the query have rows of their
        own; in the decoder, such keys are masked.
        """
        rows, longest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        rows = rows if self.is_decoder else rows // 2
        offset = torch.zeros_like(distance) if self.is_decoder else (distance > 0) * rows
        distance, exact = distance.abs(), rows // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(longest / exact)  # 1 at the longest
        large = (exact + (growth * (rows - exact)).long()).clamp(max=rows - 1)
        return offset + torch.where(distance < exact, distance, large)

    def forward(self, x: Tensor, source_mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """Run the layers on x (B, T, D). The decoder attends to `memory` (B, S, D) where `source_mask` (B, 1, 1, S)."""
        positions = torch.arange(x.shape[1], device=x.device)
        distance = positions - positions[:, None]  # (T, T)
        bias = self.relative_attention_bias(self.buckets(distance)).permute(2, 0, 1)  # (heads, T, T)
        mask = bias.masked_fill(~(distance <= 0 if self.is_decoder else source_mask), -math.inf)
        for block in self.block.values():
            x = block(x, mask, memory, source_mask)
        return self.final_layer_norm(x)


class Stage(nn.Module):
    """Some layers of the encoder, of the decoder, or of both. The first stage of each half and the last stage have the
    embedding.
    """

    def __init__(self, config: T5Config, encoder: range, decoder: range) -> None:
        super().__init__()
        self.is_last = decoder.stop == config.num_decoder_layers
        self.scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        if 0 in encoder or 0 in decoder or self.is_last:
            self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Half(config, encoder, False) if encoder else None
        self.decoder = Half(config, decoder, True) if decoder else None

    def forward(
        self, memory: Tensor | None = None, x: Tensor | None = None, *, source: Tensor, target: Tensor, measure: Measure
    ) -> Message:
        """Run the layers.

        Args:
            memory: hidden states or output of the encoder (B, S, D); none on the first stage.
            x: hidden states of the decoder (B, T, D); none until its first stage.
            source, target, measure: tokens (B, S) and (B, T), and the function that the last stage returns.
        """
        mask = (source != PAD)[:, None, None]
        if self.encoder is not None:
            memory = self.encoder(self.shared(source) if memory is None else memory, mask)
        assert memory is not None
        if self.decoder is None:
            return memory
        if x is None:
            before = F.pad(target, (1, -1), value=PAD)  # the decoder's input: the target, one token later
            x = self.shared(before.masked_fill(before == IGNORE_INDEX, PAD))
        y: Tensor = self.decoder(x, mask, memory)
        return measure(F.linear(y * self.scale, self.shared.weight), target) if self.is_last else (memory, y)


def split_layers(config: T5Config, stages: int) -> list[tuple[range, range]]:
    """Return the layers of the encoder and of the decoder in each stage. Their number differs by at most one."""
    half, total = config.num_layers, config.num_layers + config.num_decoder_layers
    if stages > total:
        raise UserError(f"{total} layers cannot fill {stages} stages; use more --layers, or a smaller --pp")
    ends = [i * total // stages for i in range(stages + 1)]
    return [(range(first, min(end, half)), range(max(first - half, 0), end - half)) for first, end in pairwise(ends)]


def name_in_transformers(name: str) -> str:
    return name.replace("relative_attention_bias", "block.0.layer.0.SelfAttention.relative_attention_bias")


def build_model(
    config: T5Config, schedule: Schedule, weights: Mapping[str, Tensor], device: torch.device
) -> DataParallel:
    """Build the stages of this rank with copies of `weights`, the `state_dict` of transformers' model."""
    layers, like = split_layers(config, schedule.num_stages), weights["shared.weight"]
    with torch.device("meta"):  # all ranks know all stages, for the tied parameters: those with the same name
        stages = dict(enumerate(Stage(config, *ranges) for ranges in layers))
    places: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for i, stage in stages.items():
        for name in stage.state_dict():
            places[name].append((i, name))
    for i in schedule.stages_of(pgm.process_group_manager.pp_rank):
        own = {name: weights[name_in_transformers(name)].to(device, copy=True) for name in stages[i].state_dict()}
        stages[i].load_state_dict(own, assign=True)

    def receives(stage: int, batch: dict[str, Any]) -> Message:
        shapes = [(*batch[name].shape, config.d_model) for name in ("source", "target")]
        memory, x = (like.new_empty(shape, device="meta") for shape in shapes)
        _, decoder = layers[stage]
        return (memory, x) if decoder.start else memory

    pipeline = Pipeline(stages, receives, schedule, [each for each in places.values() if len(each) > 1])
    return DataParallelBucket(pipeline)


def draw_batch(sequences: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sources (G, LONGEST) of different numbers, and their targets (G, LONGEST + 1): the numbers sorted, END."""
    numbers = torch.rand(sequences, NUMBERS, generator=draw).argsort()[:, :LONGEST] + FIRST_NUMBER
    lengths, places = torch.randint(SHORTEST, LONGEST + 1, (sequences, 1), generator=draw), torch.arange(LONGEST + 1)
    outside = places[:LONGEST] >= lengths
    target = F.pad(numbers.masked_fill(outside, FIRST_NUMBER + NUMBERS).sort().values, (0, 1))
    target = target.masked_fill(places == lengths, END).masked_fill(places > lengths, IGNORE_INDEX)
    return numbers.masked_fill(outside, PAD), target


def cross_entropy(logits: Tensor, target: Tensor, tokens: float) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE_INDEX, reduction="sum") / tokens


def share_correct(logits: Tensor, target: Tensor) -> Tensor:
    """Return the share of targets that greedy decoding would write: each token is the likeliest one after those before
    it in the target.
    """
    return ((logits.argmax(-1) == target) | (target == IGNORE_INDEX)).all(1).to(logits.dtype).mean()


def run(model: DataParallel, schedule: Schedule, batch: tuple[Tensor, Tensor], measure: Measure | None = None) -> float:
    """Run a training step, or an evaluation, on the sources and targets of a global batch, which every rank has.

    Args:
        measure: by default the cross entropy; its mean over micro-batches is the mean over all tokens.

    Returns:
        The mean measure over all micro-batches, the same on every rank.
    """
    grid, device = pgm.process_group_manager, next(model.parameters()).device
    source, target = (each.to(device) for each in batch)
    parts = schedule.micro_batches * grid.dp_world_size
    measure = measure or functools.partial(cross_entropy, tokens=int((target != IGNORE_INDEX).sum()) / parts)
    pairs = zip(source.chunk(parts), target.chunk(parts), strict=True)
    batches = [{"source": x, "target": y, "measure": measure} for x, y in pairs]
    result = Executor(schedule)(model, BatchList(batches[grid.dp_rank :: grid.dp_world_size]), device).double()
    all_reduce(result, grid.pp_group)
    all_reduce(result, grid.dp_group, dist.ReduceOp.AVG)
    return result.item()


def learn(config: Config, model_config: T5Config, schedule: Schedule, device: torch.device) -> None:
    """Train, and print the loss ten times; at the end, print the share of held-out sources that are sorted."""
    training, sequences = config.training, config.global_batch_size
    torch.manual_seed(training.seed)
    model = build_model(model_config, schedule, T5ForConditionalGeneration(model_config).state_dict(), device)
    optimizer = AdamW(model, training, fused=False)
    scheduler = make_scheduler(optimizer, training)
    draw = torch.Generator().manual_seed(training.seed)
    held_out = draw_batch(HELD_OUT * sequences, draw)
    report = print_line if dist.get_rank() == 0 else lambda line: None
    for step in range(1, training.total_train_steps + 1):
        loss = run(model, schedule, draw_batch(sequences, draw))
        update_weights(model, optimizer, training.max_grad_norm)
        scheduler.step()
        if step % math.ceil(training.total_train_steps / 10) == 0:
            report(f"step {step} | loss {loss:.4f}")
    evaluation = forward_only(schedule.pp, schedule.micro_batches, schedule.chunks, schedule.placement)
    correct = run(model, evaluation, held_out, share_correct)
    report(f"{correct:.1%} of {HELD_OUT * sequences} held-out sequences are sorted")


def read_options(arguments: list[str]) -> tuple[Config, T5Config, Schedule]:
    """Return the config of a run, the config of its model, and its schedule, from a command line."""
    processes, positive = int(os.environ.get("WORLD_SIZE", 1)), number(int, 1, 2**20)
    parser = Parser(description="Train an encoder-decoder.", allow_abbrev=False)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="pipeline schedule [1f1b]")
    parser.add_argument("--pp", type=positive, default=processes, help="processes of a pipeline [all]")
    parser.add_argument("--steps", type=positive, default=100, help="optimizer steps [100]")
    parser.add_argument("--micro_batches", type=positive, default=8, help="of a data-parallel rank, per step [8]")
    parser.add_argument("--layers", type=positive, default=4, help="layers of each half of the model [4]")
    options = parser.parse_args(arguments)
    dp, left = divmod(processes, options.pp)
    if left:
        raise UserError(
            f"--pp {options.pp} needs a multiple of {options.pp} processes, but {processes} started; use torchrun "
            f"--nproc_per_node {options.pp}"
        )
    layout = {"pp_size": options.pp, "dp_size": dp, "use_cpu": not torch.cuda.is_available()}
    training = {"total_train_steps": options.steps, "warmup_steps": options.steps // 10, "learning_rate": 3e-3}
    training |= {"gradient_accumulation_steps": options.micro_batches, "micro_batch_size": 16}
    config = parse_config(
        {"distributed": layout, "training": training, "model": {"name": "T5"}, "dataset": {"name": "numbers"}}
    )
    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 256, "num_layers": options.layers}
    model_config = T5Config(vocab_size=FIRST_NUMBER + NUMBERS, dropout_rate=0.0, **sizes)
    schedule = build(options.schedule, options.pp, options.micro_batches)
    split_layers(model_config, schedule.num_stages)
    return config, model_config, schedule


def main() -> None:
    config, model_config, schedule = read_options(sys.argv[1:])
    device, layout = set_up_device(config), config.distributed
    init_process_group(config, device)
    setup_process_group_manager(1, 1, layout.pp_size, layout.dp_size)
    learn(config, model_config, schedule, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_error(main)
