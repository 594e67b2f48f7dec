"""Generate text:  python generate.py --checkpoint runs/quickstart --prompt "def main("

The model is a checkpoint, the newest checkpoint of a run folder, or a Hugging Face Llama. Several processes can divide
its layers (pp_size), its matrices (tp_size) and, with the remaining factor of their number, the prompts of a file:

    torchrun --nproc_per_node 4 generate.py --checkpoint DIR --pp_size 2 --prompts prompts.txt --output out.jsonl
"""

import argparse
import codecs
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig

from picotron.checkpoint.checkpoint import Checkpoint
from picotron.checkpoint.safetensors_folder import find_folder
from picotron.command_line import parse_config
from picotron.config import Model
from picotron.console import Parser, UserError, first_line, number, print_line
from picotron.files import parse_json
from picotron.generation.rotation import Completion, check_prompt, generate
from picotron.generation.sampling import Sampling
from picotron.model.model_config import end_tokens, load_model_config
from picotron.parallelize import build_stage, check_layout
from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
from picotron.process_group_manager import setup_process_group_manager
from picotron.run.launch import exit_on_error, init_process_group, set_up_device
from picotron.run.run_folder import checkpoint_folders

logger = logging.getLogger("picotron")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_model_config(folder: Path) -> LlamaConfig:
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


def load_model(folder: Path, pp_size: int = 1, tp_size: int = 1) -> PipelineParallel:
    """Load this rank's part of the model in a folder, in the dtype of its config. Connects the processes that torchrun
    has started.

    Raises:
        UserError: the folder holds no Llama, its files are damaged, or the model does not fit the layout.
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
                "use_cpu": not torch.cuda.is_available(),
            },
            "model": {"name": str(folder)},
            "dataset": {"name": "none"},
            "environment": {"OMP_NUM_THREADS": torch.get_num_threads()},
        }
    )
    model_config = read_model_config(folder)
    plan = check_layout(config, model_config)
    device = set_up_device(config)
    init_process_group(config, device)
    setup_process_group_manager(tp_size, 1, pp_size, dp_size)
    weights = Checkpoint(folder, weights_only=True).weights()
    return build_stage(config, model_config, plan, device, model_config.dtype, weights)


def read_prompts(path: Path) -> dict[str, str]:
    """Read a prompt from each line of a .txt file, or from the key "prompt" of each line of a .jsonl file.

    Returns:
        The prompts, in order, by the name of their line.

    Raises:
        UserError: the file cannot be read, or a line has no prompt.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--prompts {path} should be a .txt file or a .jsonl file")
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise UserError(f"cannot read --prompts {path}: {error.strerror}; check the path") from None
    prompts = {}
    for name, line in ((f"{path}, line {row},", line) for row, line in enumerate(lines, 1)):
        if path.suffix == ".jsonl" and not line.strip():
            continue
        try:
            prompt = line.decode() if path.suffix == ".txt" else parse_json(line, name)["prompt"]
            prompt.encode()  # JSON can have half of a pair of surrogates
        except UnicodeError:
            raise UserError(f"{name} is not valid UTF-8; save the file as UTF-8") from None
        except (KeyError, TypeError, AttributeError):
            raise UserError(f'{name} should be an object with a text "prompt": {{"prompt": "..."}}') from None
        prompts[name] = prompt
    if not prompts:
        raise UserError(f"--prompts {path} has no prompts; write one on each line")
    return prompts


class Encoder:
    """The tokenizer of a model's folder.

    Raises:
        UserError: the folder has no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            raise UserError(f"no tokenizer in {folder} ({first_line(error)}); save one there") from None

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, with the tokenizer's start token, and without the end token that some
        tokenizers append to a text (T5's).
        """
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer(prompt)["input_ids"] or [end]
        if ids[-1] == end and len(ids) > 1 and not prompt.endswith(self.tokenizer.eos_token):
            ids = ids[:-1]
        if ids == [None]:
            raise UserError(
                f"the tokenizer of {self.folder} has no end-of-sequence token, which an empty prompt needs; use a prompt "
                f"with text"
            )
        return ids

    @property
    def ends(self) -> list[int]:
        """The end token, if the tokenizer has one."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def completion(self, prompt: list[int], new: list[int]) -> str:
        """Return the text of new tokens. (Alone, some tokenizers decode it without its first space.)"""
        before, text = self.decode(prompt), self.decode(prompt + new)
        return text.removeprefix(before) if text.startswith(before) else self.decode(new)


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


def as_lines(texts: list[str], prompts: list[list[int]], completions: list[Completion], encoder: Encoder) -> str:
    """Format a line of JSON for each completion, whose tokens do not include an end token."""
    lines = []
    for text, prompt, (tokens, log_probs) in zip(texts, prompts, completions, strict=True):
        completion = encoder.completion(prompt, tokens)
        line = {"prompt": text, "text": completion, "tokens": tokens, "log_probs": log_probs}
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
    parser = Parser(description="Generate text with a checkpoint or a Hugging Face Llama.")

    def add(name: str, type: Any, default: Any, text: str) -> None:
        parser.add_argument(name, type=type, default=default, help=f"{text} [{default}]")

    parser.add_argument(
        "--checkpoint", required=True, help="checkpoint, run folder (for its newest checkpoint) or hub id"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", type=utf8, default="", help="beginning of the text [empty: a new document]")
    what.add_argument("--prompts", type=Path, help='file of prompts: .txt, one per line, or .jsonl, with "prompt"')
    parser.add_argument("--output", type=Path, help=".jsonl file for the completions of --prompts")
    add("--batch_size", number(int, 1), 64, "number of prompts of a file that are continued at the same time")
    add("--max_new_tokens", number(int, 0, 2**24), 100, "maximum number of new tokens")
    add("--temperature", number(float, 0), 0.0, "divisor of the logits; 0: always take the likeliest token")
    add("--top_k", number(int, 0), 0, "number of likeliest tokens to draw from; 0: all")
    add("--top_p", number(float, 0, 1), 1.0, "draw from the likeliest tokens with this probability in total; 1: all")
    add("--seed", number(int, 0, 2**63 - 1), 0, "seed of the random draws")
    add("--pp_size", number(int, 1), 1, "number of pipeline ranks, each of which holds some of the layers")
    add("--tp_size", number(int, 1), 1, "number of tensor-parallel ranks, each of which holds a shard of every matrix")
    options = parser.parse_args()
    if (options.prompts is None) != (options.output is None):
        parser.error("--prompts and --output need each other: a file of prompts and a file for their completions")
    if options.output is not None and options.output.resolve() == options.prompts.resolve():
        parser.error("--output would overwrite --prompts; choose another file")
    return options


def main() -> None:
    options = parse_arguments()
    folder = [find_folder(options.checkpoint), *checkpoint_folders(Path(options.checkpoint)).values()][-1]
    if (folder / "metrics.jsonl").exists():
        raise UserError(
            f"{folder} is a run folder without checkpoints; train with checkpoint.save_frequency of 1 or more"
        )
    model_config, encoder = read_model_config(folder), Encoder(folder)
    texts = {"--prompt": options.prompt} if options.prompts is None else read_prompts(options.prompts)
    prompts = [encoder.encode(text) for text in texts.values()]
    for name, prompt in zip(texts, prompts, strict=True):
        check_prompt(name, prompt, model_config.vocab_size)
    ends = tuple(end_tokens(model_config) or encoder.ends)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.seed, ends)
    is_first, limit = int(os.environ.get("RANK", 0)) == 0, model_config.max_position_embeddings
    output = options.output if is_first else None
    if output is not None:
        write_output(
            output, "", "a"
        )  # an error comes before anything expensive starts, and the old file stays until then
    model = load_model(folder, options.pp_size, options.tp_size)
    if is_first and max(map(len, prompts)) + options.max_new_tokens > limit:
        logger.warning("the text may exceed %d tokens, the maximum sequence length of the model", limit)
    progress = tqdm(total=len(prompts), desc="Generating", unit=" prompts", disable=output is None)
    for start in range(0, len(prompts), options.batch_size):
        batch = slice(start, start + options.batch_size)
        try:
            completions = [without_end(each, ends) for each in generate(model, prompts[batch], sampling, start)]
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
        if output is not None:
            lines = as_lines([*texts.values()][batch], prompts[batch], completions, encoder)
            write_output(output, lines, "a" if start else "w")
        progress.update(len(prompts[batch]))
    progress.close()
    if is_first and options.output is None:
        print_line(f"{folder}:\n{encoder.decode(prompts[0] + completions[0].tokens)}")
    elif is_first:
        print_line(f"{len(prompts):,} completions in {options.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_on_error(main)
