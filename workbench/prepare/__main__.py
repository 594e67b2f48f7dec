"""Write the token files of a run, and print their folder:

python -m workbench.prepare --config FILE [overrides]
"""

import sys

from picotron.console import UserError
from workbench.console import print_line
from workbench.prepare.tokens import write_tokens
from workbench.run.config_reader import load_config
from workbench.run.launch import exit_on_error, set_up_logging
from workbench.run.model_config import load_model_config
from workbench.run.run_folder import parse_load_path


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
