"""A T5 in a pipeline of any schedule:  torchrun --nproc_per_node 2 -m examples.encoder_decoder --schedule zbv

An encoder reads the source, and a decoder, whose layers attend to the encoder's output, writes the target (T5, Raffel
et al. 2020, arXiv:1910.10683, without dropout). Their layers, here four in each half, form the stages:

    stage      0              1               2                  3
    layers     encoder 0, 1   encoder 2, 3    decoder 0, 1       decoder 2, 3
    receives   tokens         hidden states   encoder's output   encoder's output and hidden states

So the encoder's output passes through the stages of the decoder, and each of them adds its part to the gradient that
returns. Three matrices are tied: the embedding, which is also the head, and the position biases of each half, which all
its layers share. Every stage that uses one of these matrices has a replica.

The toy task is to sort numbers. The layers are those of transformers' T5ForConditionalGeneration.
"""

import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Stack

from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from picotron.console import UserError
from picotron.data_parallel.data_parallel import DataParallel, DataParallelBucket
from picotron.optimizer import AdamW, make_scheduler, update_weights
from workbench.console import Parser, print_line
from workbench.pipelines.modules import Message, Pipeline
from workbench.pipelines.whole_batch import WholeBatchStep
from workbench.run.config_reader import parse_config
from workbench.run.launch import connect, exit_on_error, has_gpu_per_rank
from workbench.schedules.actions import Schedule
from workbench.schedules.schedules import SCHEDULES, build

PAD, FIRST_NUMBER, NUMBERS = 0, 1, 30  # tokens; PAD also begins the decoder's input
LENGTH, HELD_OUT = 10, 8  # numbers in a source, and global batches


def keep_layers(half: T5Stack, layers: range) -> T5Stack | None:
    """Remove all layers of the encoder or of the decoder but some, of which the first one gets the position biases.
    Returns None if there are none.
    """
    if not layers:
        return None
    biases, is_end = half.block[0].layer[0].SelfAttention.relative_attention_bias, layers.stop == len(half.block)
    for i in set(range(len(half.block))) - set(layers):
        delattr(half.block, str(i))  # the others keep their names
    first = next(iter(half.block)).layer[0].SelfAttention
    first.relative_attention_bias, first.has_relative_attention_bias = biases, True
    if not is_end:
        half.final_layer_norm = nn.Identity()
    del half.embed_tokens
    return half


class Stage(nn.Module):
    """Some layers of the encoder, of the decoder, or of both. The first stage of each half and the last stage have the
    embedding.
    """

    def __init__(self, config: T5Config, encoder: range, decoder: range) -> None:
        super().__init__()
        self.is_last = decoder.stop == config.num_decoder_layers
        self.scale = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        whole = T5ForConditionalGeneration(config)
        if 0 in encoder or 0 in decoder or self.is_last:
            self.shared = whole.shared
        self.encoder, self.decoder = keep_layers(whole.encoder, encoder), keep_layers(whole.decoder, decoder)

    def forward(
        self, memory: Tensor | None = None, x: Tensor | None = None, *, source: Tensor, before: Tensor
    ) -> Message:
        """Run the layers. The last stage returns logits (B, T, V).

        Args:
            memory: hidden states or output of the encoder (B, S, D); none on the first stage.
            x: hidden states of the decoder (B, T, D); none until its first stage.
            source: tokens (B, S).
            before: the decoder's input (B, T): the target, one token later.
        """
        mask = source != PAD
        if self.encoder is not None:
            states = self.shared(source) if memory is None else memory
            memory = self.encoder(inputs_embeds=states, attention_mask=mask).last_hidden_state
        assert memory is not None
        if self.decoder is None:
            return memory
        x = self.shared(before) if x is None else x
        outputs = self.decoder(
            inputs_embeds=x, encoder_hidden_states=memory, encoder_attention_mask=mask, use_cache=False
        )
        y: Tensor = outputs.last_hidden_state
        return F.linear(y * self.scale, self.shared.weight) if self.is_last else (memory, y)


def split_layers(config: T5Config, stages: int) -> list[tuple[range, range]]:
    """Return the layers of the encoder and of the decoder in each stage. Their number differs by at most one."""
    half, total = config.num_layers, config.num_layers + config.num_decoder_layers
    if stages > total:
        raise UserError(f"{total} layers cannot fill {stages} stages; use fewer processes")
    ends = [i * total // stages for i in range(stages + 1)]
    return [(range(first, min(end, half)), range(max(first - half, 0), end - half)) for first, end in pairwise(ends)]


def name_in_transformers(name: str) -> str:
    return re.sub(r"block\.\d+(?=.*relative_attention_bias)", "block.0", name)


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
            places[name_in_transformers(name)].append((i, name))
    for i in schedule.stages_of(pgm.process_group_manager.pp_rank):
        own = {name: weights[name_in_transformers(name)].to(device, copy=True) for name in stages[i].state_dict()}
        stages[i].load_state_dict(own, assign=True)

    def receives(stage: int, batch: dict[str, Any]) -> Message:
        shapes = [(*batch[name].shape, config.d_model) for name in ("source", "before")]
        memory, x = (like.new_empty(shape, device="meta") for shape in shapes)
        _, decoder = layers[stage]
        return (memory, x) if decoder.start else memory

    pipeline = Pipeline(stages, receives, schedule, [each for each in places.values() if len(each) > 1])
    return DataParallelBucket(pipeline)


def draw_batch(sequences: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sources (G, LENGTH) of different numbers, and their targets: the same numbers, sorted."""
    numbers = torch.rand(sequences, NUMBERS, generator=draw).argsort()[:, :LENGTH] + FIRST_NUMBER
    return numbers, numbers.sort().values


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def on_every_rank(number: float, device: torch.device) -> float:
    """Return the sum of a number over the pipeline: that of the rank with the last stage, if all others have 0."""
    total = torch.tensor(number, dtype=torch.float64, device=device)
    all_reduce(total, pgm.process_group_manager.pp_group)
    return total.item()


def run(step: WholeBatchStep, batch: tuple[Tensor, Tensor]) -> tuple[float, Tensor | None]:
    """Run a step on the sources and targets of a batch, which every rank has.

    Returns:
        The mean loss, and on the rank with the last stage the logits.
    """
    source, target = (each.to(step.device) for each in batch)
    losses = list[Tensor]()
    logits = step(source=source, before=F.pad(target, (1, -1), value=PAD), target=target, losses=losses)
    return on_every_rank(sum(each.item() for each in losses) / step.micro_batches, step.device), logits


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
    train, evaluate = (WholeBatchStep(schedule, model, device, loss_fn) for loss_fn in (cross_entropy, None))
    for step in range(1, training.total_train_steps + 1):
        loss, _ = run(train, draw_batch(sequences, draw))
        update_weights(model, optimizer, training.max_grad_norm)
        scheduler.step()
        if step % math.ceil(training.total_train_steps / 10) == 0:
            report(f"step {step} | loss {loss:.4f}")
    _, logits = run(evaluate, held_out)
    # Greedy decoding would write a target if each of its tokens is the likeliest one after those before it.
    sorts = 0.0 if logits is None else (logits.argmax(-1).cpu() == held_out[1]).all(1).double().mean().item()
    correct = on_every_rank(sorts, device)
    report(f"{correct:.1%} of {HELD_OUT * sequences} held-out sequences are sorted")


def read_options(arguments: list[str]) -> tuple[Config, T5Config, Schedule]:
    """Return the config of a run on all processes, the config of its model, and its schedule, from a command line."""
    parser = Parser(description="Train an encoder-decoder.", allow_abbrev=False)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="pipeline schedule [1f1b]")
    options, pp = parser.parse_args(arguments), int(os.environ.get("WORLD_SIZE", 1))
    training = {"total_train_steps": 100, "warmup_steps": 10, "learning_rate": 3e-3}
    training |= {"gradient_accumulation_steps": 8, "micro_batch_size": 16}
    layout = {"pp_size": pp, "use_cpu": not has_gpu_per_rank()}
    config = parse_config(
        {"distributed": layout, "training": training, "model": {"name": "T5"}, "dataset": {"name": "numbers"}}
    )
    sizes = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 256, "num_layers": 4}
    model_config = T5Config(vocab_size=FIRST_NUMBER + NUMBERS, dropout_rate=0.0, **sizes)
    return config, model_config, build(options.schedule, pp, config.training.gradient_accumulation_steps)


def main() -> None:
    config, model_config, schedule = read_options(sys.argv[1:])
    learn(config, model_config, schedule, connect(config))
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_error(main)
