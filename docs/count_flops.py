"""The FLOPs that a token costs in training, counted by torch, beside the formula of MFU:  python -m docs.count_flops

Torch counts what matrices multiply, on the meta device, where nothing is computed. So the norms' few FLOPs, which the
formula has, are missing in its count.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from picotron.config import Model
from picotron.model import Llama, load_model_config, math_attention
from picotron.schedules.costs import model_cost


def main() -> None:
    config = load_model_config(Model(name="template/tiny-llama"))
    with torch.device("meta"):
        model = Llama(config, math_attention)
    print(f"{'T':>6}{'6 N':>14}{'12 L H d T':>14}{'formula':>14}{'counted':>14}")
    for length in (256, 1024, 4096):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long, device="meta")).sum().backward()
        counted = counter.get_total_flops() / length
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
        formula = model_cost(config, length).flops
        print(f"{length:6}{formula - attention:14,.0f}{attention:14,}{formula:14,.0f}{counted:14,.0f}")


if __name__ == "__main__":
    main()
