"""The MFU of docs/seventy_billion.json on H100s, step by step:  python -m docs.programs.work_out_mfu"""

from picotron.command_line import load_config
from picotron.explain.forecast import forecast
from picotron.explain.hardware import HARDWARE
from picotron.model.flops import model_cost, part_costs
from picotron.model.model_config import load_model_config
from picotron.parallelize import check_layout


def main() -> None:
    config, hardware = load_config(["--config", "docs/seventy_billion.json"]), HARDWARE["H100"]
    model, T, ranks = load_model_config(config.model), config.training.seq_length, config.distributed.world_size
    flops, head = model_cost(model, T).flops, part_costs(model, T)[2]
    attention = 12 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * T
    rate = forecast(config, model, check_layout(config, model), hardware).tokens_per_second
    peak = ranks * hardware.peak
    print(f"6 N          {(flops - attention) / 1e9:8.2f} GFLOPs per token, of which the head {head.flops / 1e9:.2f}")
    print(f"12 L H d T   {attention / 1e9:8.2f} GFLOPs per token")
    print(f"tokens/s     {rate:8,.0f}")
    print(f"product      {rate * flops / 1e15:8.2f} PFLOP/s")
    print(f"data sheets  {peak / 1e15:8.2f} PFLOP/s of {ranks:,} GPUs")
    print(f"MFU          {rate * flops / peak:8.1%}")


if __name__ == "__main__":
    main()
