"""Write conversations about the functions of some modules, and a tokenizer with a chat template.

python -m docs.programs.conversations conversations.jsonl runs/chat_tokenizer
"""

import inspect
import json
import math
import random
import statistics
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.files import write_atomically
from workbench.prepare.tokens import train_bpe

MODULES = (math, random, statistics, textwrap)
VOCAB_SIZE = 1024
CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def conversations_about(module: ModuleType) -> Iterator[dict[str, Any]]:
    """Yield a conversation for each public function of a module that has a docstring."""
    for name, function in inspect.getmembers(module, inspect.isroutine):
        if name.startswith("_") or not (docstring := inspect.getdoc(function)):
            continue
        sentence = " ".join(docstring.split("\n\n")[0].split())
        texts = f"Where is {name}?", f"In the module {module.__name__}.", "What does it do?", sentence
        yield {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def main(path: str, folder: str) -> None:
    conversations = [each for module in MODULES for each in conversations_about(module)]
    write_atomically(Path(path), "".join(json.dumps(each) + "\n" for each in conversations))
    texts = (message["content"] for each in conversations for message in each["messages"])
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = train_bpe(texts, VOCAB_SIZE - len(special))
    tokenizer.add_special_tokens({"additional_special_tokens": special[:1], "eos_token": special[1]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    print(f"{len(conversations)} conversations in {path}; the first one:\n")
    for message in conversations[0]["messages"]:
        print(f"{message['role']}: {message['content']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
