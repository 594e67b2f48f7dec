"""Generate text:  python generate.py --checkpoint runs/quickstart --prompt "def main("

The model is a checkpoint, the newest checkpoint of a run folder, or a Hugging Face Llama, run in one process. The keys
and values of all earlier tokens are kept (KV cache), so a new token costs a forward pass of one token.
"""

import argparse
import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from picotron.arguments import number
from picotron.checkpoint.checkpoint import check_files, read_state
from picotron.checkpoint.safetensors_folder import SafetensorsFolder, find_folder
from picotron.config import Model
from picotron.errors import UserError, first_line
from picotron.launch import exit_on_error
from picotron.model import Attention, Llama, fused_attention
from picotron.model_config import load_model_config
from picotron.packed_attention import PackedDocuments
from picotron.run_folder import checkpoint_folders
from picotron.weights import materialise

logger = logging.getLogger("picotron")


class CachedAttention:
    """Causal attention with a KV cache for up to `max_length` tokens: new tokens attend to all earlier ones, too.

    q (B, H, T, d); k, v (B, K, T, d) -> (B, H, T, d). The first call has the prompt, every later call one token.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self.keys = self.values = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: PackedDocuments | None = None) -> Tensor:
        assert documents is None, "a prompt is one document"
        start, self.length = self.length, self.length + k.size(2)
        if start == 0:
            self.keys, self.values = (x.new_empty(*x.shape[:2], self.max_length, x.size(3)) for x in (k, v))
        self.keys[:, :, start : self.length], self.values[:, :, start : self.length] = k, v
        if start == 0:
            return fused_attention(q, k, v)
        assert q.size(2) == 1
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def load_model(folder: Path, device: torch.device) -> Llama:
    """Load the model of a folder, in the dtype of its config.json, or else in float32.

    Raises:
        UserError: the folder holds no Llama, or its files are damaged.
    """
    if (state := read_state(folder)) is not None:
        check_files(folder, state.model_files)
    config = load_model_config(Model(name=str(folder)))
    with torch.device("meta"):
        model = Llama(config).to(config.dtype or torch.float32)
    materialise(model, device, SafetensorsFolder(folder).read)
    return model.eval()


@torch.inference_mode()
def generate(
    model: Llama,
    prompt_ids: list[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    end: int | None = None,
) -> list[int]:
    """Generate the tokens that follow a prompt.

    Args:
        max_new_tokens: maximum number of tokens to generate.
        temperature: divisor of the logits before the softmax; 0 always takes the likeliest token.
        top_k: number of likeliest tokens to draw from; 0 draws from all.
        seed: seed of the random draws.
        end: token that ends the text, and is not returned.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attention_fn = CachedAttention(len(prompt_ids) + max_new_tokens)
    tokens, new = list(prompt_ids), list(prompt_ids)
    while len(tokens) < len(prompt_ids) + max_new_tokens:
        positions = torch.arange(len(tokens) - len(new), len(tokens), device=device)[None]
        hidden = model.run_layers(model.embed(torch.tensor([new], device=device)), positions)
        logits = model.logits_or_loss(hidden[:, -1:])[0, 0].double()
        new = [draw(logits, temperature, top_k, generator)]
        if new[0] == end:
            break
        tokens += new
    return tokens[len(prompt_ids) :]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw the next token from the logits (V,), see `generate`."""
    if temperature < 1e-6:  # the quotient could overflow
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a checkpoint or a Hugging Face Llama.")
    parser.add_argument(
        "--checkpoint", required=True, help="checkpoint, run folder (for its newest checkpoint) or hub id"
    )
    parser.add_argument("--prompt", default="", help="beginning of the text [empty: a new document]")
    parser.add_argument(
        "--max_new_tokens", type=number(int, 0, 2**24), default=100, help="maximum number of new tokens [100]"
    )
    parser.add_argument(
        "--temperature",
        type=number(float, 0),
        default=0.0,
        help="divisor of the logits; 0: always take the likeliest token [0]",
    )
    parser.add_argument(
        "--top_k", type=number(int, 0), default=0, help="number of likeliest tokens to draw from; 0: all [0]"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help="seed of the random draws [0]")
    options = parser.parse_args()
    folder = [find_folder(options.checkpoint), *checkpoint_folders(Path(options.checkpoint)).values()][-1]
    if (folder / "metrics.jsonl").exists():
        raise UserError(
            f"{folder} is a run folder without checkpoints; train with checkpoint.save_frequency of 1 or more"
        )
    model = load_model(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise UserError(f"no tokenizer in {folder} ({first_line(error)}); save one there") from None
    prompt_ids = tokenizer(options.prompt)["input_ids"] or [tokenizer.eos_token_id]
    if prompt_ids == [None]:
        raise UserError(
            f"the tokenizer of {folder} has no end-of-sequence token, which an empty prompt needs; use --prompt"
        )
    limit = model.config.max_position_embeddings
    if len(prompt_ids) + options.max_new_tokens > limit:
        logger.warning("the text may exceed %d tokens, the maximum sequence length of the model", limit)
    end = tokenizer.eos_token_id
    new = generate(model, prompt_ids, options.max_new_tokens, options.temperature, options.top_k, options.seed, end)
    print(f"{folder}:\n{tokenizer.decode(prompt_ids + new, skip_special_tokens=True)}")


if __name__ == "__main__":
    exit_on_error(main)
