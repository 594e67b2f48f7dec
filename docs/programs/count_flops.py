"""FLOPs per token in training, counted by torch and by the formula that MFU uses:  python -m docs.programs.count_flops

Torch counts matrix products only, on the meta device, where nothing is computed. So its count lacks the few FLOPs of
the norms, which the formula includes.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from picotron.config import Model
from picotron.console import text_table
from picotron.model.flops import model_cost
from picotron.model.llama import Llama, math_attention
from picotron.model.model_config import load_model_config


def main() -> None:
    config = load_model_config(Model(name="template/tiny-llama"))
    with torch.device("meta"):
        model = Llama(config, math_attention)
    rows = [["T", "6 N", "12 L H d T", "formula", "counted"]]
    for length in (256, 1024, 4096):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long, device="meta")).sum().backward()
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
        formula = model_cost(config, length).flops
        counted = counter.get_total_flops() // length
        rows.append([f"{n:,}" for n in (length, formula - attention, attention, formula, counted)])
    print(f"FLOPs per token in training, for sequences of T tokens\n\n{text_table(rows, first_number=0)}")


if __name__ == "__main__":
    main()
