"""The program generate.py: text of a prompt, of a file of prompts, or a conversation."""

import argparse
import datetime
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PreTrainedConfig

from picotron.config import Model
from picotron.console import UserError
from picotron.model.families import differences
from workbench.console import Parser, is_rank_0, number, print_line
from workbench.files import naming_deleted
from workbench.generation.prompts import CompletionPrinter, Encoder, Prompt, read_prompts
from workbench.generation.rotation import Completion, check_prompt, generate
from workbench.generation.sampling import Sampling
from workbench.pipelines.engine import check_layout
from workbench.pipelines.modules import LlamaStages
from workbench.run.checkpoint.checkpoint import Checkpoint
from workbench.run.checkpoint.safetensors_folder import find_folder
from workbench.run.config_reader import parse_config
from workbench.run.launch import check_same, connect, has_gpu_per_rank
from workbench.run.model_config import end_tokens, load_model_config
from workbench.run.ranks import run_ranks
from workbench.run.run_folder import checkpoint_folders
from workbench.variants.choose import build_stage

logger = logging.getLogger("picotron")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_model_config(folder: Path) -> PreTrainedConfig:
    """Load the config of the model in a folder, with a dtype: by default float32.

    Raises:
        UserError: see `load_model_config`, or the dtype is not one of DTYPES.
    """
    config = load_model_config(Model(name=str(folder)))
    if config.dtype is None:
        config.dtype = torch.float32
    if config.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        dtype = str(config.dtype).removeprefix("torch.")
        raise UserError(f"dtype={dtype!r} in the config.json of {folder} is not supported; use one of {names}")
    return config


def load_model(folder: Path, pp_size: int = 1, tp_size: int = 1) -> LlamaStages:
    """Load this rank's part of the model in a folder, in the dtype of its config. Connects the ranks.

    Raises:
        UserError: the folder holds no supported model, its files are damaged, the model does not fit the layout, or
            ranks read different checkpoints.
    """
    dp_size, left = divmod(int(os.environ.get("WORLD_SIZE", 1)), pp_size * tp_size)
    if left or not dp_size:
        raise UserError(
            f"pp_size={pp_size} x tp_size={tp_size} needs a multiple of {pp_size * tp_size} processes, but "
            f"{dp_size * pp_size * tp_size + left} started; use torchrun --nproc_per_node {pp_size * tp_size}"
        )
    config = parse_config(
        {
            "distributed": {
                "pp_size": pp_size,
                "tp_size": tp_size,
                "dp_size": dp_size,
                "use_cpu": not has_gpu_per_rank(),
            },
            "model": {"name": folder.absolute().name},  # machines may have the model in different places
            "training": {"seq_length": 1},  # `generate` checks lengths
            "dataset": {"name": "none"},
            "environment": {"OMP_NUM_THREADS": torch.get_num_threads()},
        }
    )
    model_config = read_model_config(folder)
    plan = check_layout(config, model_config)
    device = connect(config, model_config, plan.identity)
    weights = Checkpoint(folder, weights_only=True).weights()
    stage: Any = build_stage(config, model_config, plan.wrap, device, model_config.dtype, weights)
    return stage


def without_end(completion: Completion, ends: tuple[int, ...]) -> Completion:
    """Drop the end token of a completion."""
    if completion.tokens and completion.tokens[-1] in ends:
        return Completion(completion.tokens[:-1], completion.log_probs[:-1])
    return completion


def write_output(path: Path, text: str, mode: str) -> None:
    """Write a text to the file of completions ("w"), or append it ("a").

    Raises:
        UserError: it cannot be written.
    """
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write --output {path}: {error.strerror}; choose another file") from None


def as_lines(records: list[Prompt], prompts: list[list[int]], completions: list[Completion], encoder: Encoder) -> str:
    """Format a line of JSON for each completion, whose tokens do not include an end token. Those of a prompt follow one
    another.
    """
    lines, samples = [], len(completions) // len(prompts)
    for i, (tokens, log_probs) in enumerate(completions):
        record, prompt = records[i // samples], prompts[i // samples]
        line = {**record, "text": encoder.completion(prompt, tokens), "tokens": tokens, "log_probs": log_probs}
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def utf8(word: str) -> str:
    """Type of an argument for argparse: a text. Bytes of a command line that are not UTF-8 are half surrogates."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the text is not valid UTF-8; check the encoding of the terminal") from None
    return word


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Generate text with a checkpoint or a model of Hugging Face.")

    def add(names: str, type: Any, default: Any, text: str) -> None:
        parser.add_argument(*names.split(), type=type, default=default, help=f"{text} [{default}]")

    parser.add_argument(
        "--checkpoint", type=utf8, required=True, help="checkpoint, run folder (for its newest checkpoint) or hub id"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", type=utf8, default="", help="beginning of the text [empty: a new document]")
    what.add_argument(
        "--prompts", type=Path, help='file of prompts: .txt, one per line, or .jsonl, with "prompt" or "messages"'
    )
    what.add_argument("--chat", action="store_true", help="hold a conversation; Ctrl-D ends it")
    parser.add_argument("--output", type=Path, help=".jsonl file for the completions of --prompts")
    add("--batch_size", number(int, 1), 64, "number of prompts of a file that are continued at the same time")
    add("--max_new_tokens", number(int, 0, 2**24), 100, "maximum number of new tokens")
    add("--min_new_tokens", number(int, 0), 0, "number of new tokens before which no text ends")
    add("--temperature", number(float, 0), 0.0, "divisor of the logits; 0: always take the likeliest token")
    add("--top_k", number(int, 0), 0, "number of likeliest tokens to draw from; 0: all")
    add("--top_p", number(float, 0, 1), 1.0, "draw from the likeliest tokens with this probability in total; 1: all")
    add(
        "--num_return_sequences",
        number(int, 1, 2**16),
        1,
        "number of completions of each prompt, for a temperature above 0",
    )
    add("--seed", number(int, 0, 2**63 - 1), 0, "seed of the random draws")
    add("--pp_size --distributed.pp_size", number(int, 1), 1, "number of pipeline ranks, which split the layers")
    add("--tp_size --distributed.tp_size", number(int, 1), 1, "number of tensor-parallel ranks, which split matrices")
    options = parser.parse_args()
    if (options.prompts is None) != (options.output is None):
        parser.error("--prompts and --output need each other: a file of prompts and a file for their completions")
    if options.output is not None and os.path.realpath(options.output) == os.path.realpath(options.prompts):
        parser.error("--output would overwrite --prompts; choose another file")
    if options.chat and options.num_return_sequences > 1:
        parser.error("--chat gives one answer to each message; remove --num_return_sequences")
    return options


def complete(
    model: LlamaStages,
    encoder: Encoder,
    records: list[Prompt],
    prompts: list[list[int]],
    sampling: Sampling,
    options: argparse.Namespace,
) -> None:
    """Continue prompts, and print the text, or write the file of completions."""
    is_first, longest = dist.get_rank() == 0, max(map(len, prompts))
    if is_first and sampling.length(longest) < longest + sampling.max_new_tokens:
        logger.warning("texts end at %d tokens, the model's maximum sequence length", sampling.max_length)
    output = options.output if is_first else None
    progress = tqdm(total=len(prompts), desc="Generating", unit=" prompts", disable=output is None)
    for start in range(0, len(prompts), options.batch_size):
        batch = slice(start, start + options.batch_size)
        try:
            completions = [
                without_end(each, sampling.ends) for each in generate(model, prompts[batch], sampling, start)
            ]
        except UserError as error:
            raise UserError(f"{encoder.folder}: {error}") from None
        if output is not None:
            write_output(output, as_lines(records[batch], prompts[batch], completions, encoder), "a" if start else "w")
        progress.update(len(prompts[batch]))
    progress.close()
    if is_first and options.output is None:
        for completion in completions:
            print_line(f"{encoder.folder}:\n{encoder.decode(prompts[0] + completion.tokens)}")
    elif is_first:
        print_line(f"{len(prompts) * sampling.num_return_sequences:,} completions in {options.output}")


def chat(model: LlamaStages, encoder: Encoder, sampling: Sampling) -> None:
    """Hold a conversation with the user, until the input ends (Ctrl-D)."""
    is_first = dist.get_rank() == 0
    # A separate group with a long timeout, because users may think longer than the default timeout of collectives.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))
    messages: list[dict[str, str]] = []
    while line := read_line(group):
        messages.append({"role": "user", "content": line})
        try:
            prompt = encoder.encode_messages(messages)
            check_prompt("the conversation with it", prompt, model.module.config, sampling)
        except UserError as error:
            messages.pop()
            if is_first:
                print_line(f"(The message is dropped: {error}.)")
            continue
        printer = CompletionPrinter(encoder, prompt)
        (completion,) = generate(model, [prompt], sampling, len(messages) // 2, printer.put if is_first else None)
        answer = encoder.completion(prompt, without_end(completion, sampling.ends).tokens)
        if is_first:
            printer.end(answer)
        messages.append({"role": "assistant", "content": answer})


def read_line(group: dist.ProcessGroup) -> str:
    """Read a line with text from the terminal of rank 0. Returns it on all ranks, and "" at the end of the input."""
    lines = [""]
    if dist.get_rank() == 0:
        print_line("> ", end="")
        try:
            lines = [next(filter(str.strip, sys.stdin), "").strip()]
            lines[0].encode()  # bytes that are not UTF-8 can be half surrogates
        except UnicodeError:
            raise UserError("the line is not valid UTF-8; check the encoding of the terminal") from None
        if not lines[0] or not sys.stdin.isatty():  # a terminal shows the lines itself, and nothing for Ctrl-D
            print_line(lines[0])
    dist.broadcast_object_list(lines, group=group)
    return lines[0]


def main() -> None:
    options = parse_arguments()
    run_ranks(options.pp_size * options.tp_size, partial(run, options))


def run(options: argparse.Namespace) -> None:
    """Generate on this rank."""
    folder = [find_folder(options.checkpoint), *checkpoint_folders(Path(options.checkpoint)).values()][-1]
    if os.path.exists(folder / "metrics.jsonl"):  # False without permission, unlike `Path.exists`
        raise UserError(
            f"{folder} is a run folder without checkpoints; train with another checkpoint.save_frequency than null"
        )
    with naming_deleted(folder):
        model_config, encoder = read_model_config(folder), Encoder.read(folder)
    records: dict[str, Prompt] = {}
    if options.chat:
        encoder.check_chat_template()
    else:
        records = read_prompts(options.prompts) if options.prompts else {"--prompt": {"prompt": options.prompt}}
    ends, longest = tuple({*end_tokens(model_config), *encoder.ends}), model_config.max_position_embeddings
    longest = min(longest, differences(model_config).window or longest)
    names = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "num_return_sequences", "seed")
    sampling = Sampling(**{name: getattr(options, name) for name in names}, ends=ends, max_length=longest)
    prompts = {name: encoder.encode(name, record) for name, record in records.items()}
    for name, prompt in prompts.items():
        check_prompt(name, prompt, model_config, sampling)
    if options.output is not None and is_rank_0():
        # An error comes before anything expensive starts, and the old file stays until the first completions.
        write_output(options.output, "", "a")
    with naming_deleted(folder):
        model = load_model(folder, options.pp_size, options.tp_size)
    # Machines that share no folder can have other files of the same name.
    hashes = {f"{name} with hash": hash(tuple(prompt)) for name, prompt in prompts.items()}
    check_same(hashes | vars(sampling) | {"batch_size": options.batch_size, "chat": options.chat})
    if options.chat:
        chat(model, encoder, sampling)
    else:
        complete(model, encoder, [*records.values()], [*prompts.values()], sampling, options)
    dist.destroy_process_group()
