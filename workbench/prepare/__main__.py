"""Write the token files of a run, and print their folder:

python -m workbench.prepare --config FILE [overrides]
"""

import sys

from picotron.console import UserError, print_line
from picotron.run.config_reader import load_config
from picotron.run.launch import exit_on_error, set_up_logging
from picotron.run.model_config import load_model_config
from picotron.run.run_folder import parse_load_path
from workbench.prepare.tokens import write_tokens


def main() -> None:
    set_up_logging()
    config = load_config(sys.argv[1:])
    if config.model.tokenizer == "bpe" and (parse_load_path(config.checkpoint.load_path)[1] or config.model.pretrained):
        raise UserError(
            "model.tokenizer='bpe' is the tokenizer of the model from which training starts; set it to the folder of this model"
        )
    print_line(str(write_tokens(config, load_model_config(config.model))))


if __name__ == "__main__":
    exit_on_error(main)
