"""Generate text:  python generate.py --checkpoint runs/quickstart --prompt "def main("

The model is a checkpoint, the newest checkpoint of a run folder, or one of Hugging Face. Several processes can divide
its layers (pp_size), its matrices (tp_size) and, with the remaining factor of their number, the prompts of a file:

    python generate.py --checkpoint DIR --pp_size 2 --prompts prompts.txt --output out.jsonl

With --chat, the user and a model that was trained on conversations take turns in the terminal.
"""

import workbench.run.begin  # noqa: F401 -- before all that take long

# isort: split
from workbench.generation.program import main
from workbench.run.launch import exit_on_error

if __name__ == "__main__":
    exit_on_error(main)
