"""Write the token files of a run, and print their folder:

python -m workbench.prepare --config FILE [overrides]
"""

import sys
from pathlib import Path

from picotron.console import UserError
from workbench.console import print_line
from workbench.prepare.tokens import write_tokens
from workbench.run.config_reader import load_config
from workbench.run.launch import exit_on_error, set_up_logging
from workbench.run.model_config import load_model_config
from workbench.run.run_folder import parse_load_path
from workbench.run.token_files import FILE


def main() -> None:
    set_up_logging()
    config = load_config(sys.argv[1:], __doc__)
    if (Path(config.dataset.name) / FILE).is_file():
        raise UserError(
            f"dataset.name={config.dataset.name!r} has token files already; train.py reads them as they are"
        )
    if config.model.tokenizer == "bpe" and (parse_load_path(config)[1] or config.model.pretrained):
        raise UserError(
            "model.tokenizer='bpe' is the tokenizer of the model from which training starts; set it to the folder of this model"
        )
    print_line(str(write_tokens(config, load_model_config(config.model))))


if __name__ == "__main__":
    exit_on_error(main)
