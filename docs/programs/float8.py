"""Numbers for docs/float8.md: a vector in float8, the errors of products, and the share of a step that is in float8.

python -m docs.programs.float8
"""

import torch

from picotron.config import Model
from workbench.console import text_table
from workbench.run.model_config import load_model_config
from workbench.variants.float8 import E4M3, E5M2, float8_product, quantise


def errors(k: int) -> list[str]:
    """Relative errors of a product with k terms per element, in bfloat16, in float8, and in float8 without scales."""
    generator = torch.Generator().manual_seed(0)
    a, b = (0.01 * torch.randn(64, k, dtype=torch.float64, generator=generator) for _ in range(2))
    unscaled = a.to(E4M3).double() @ b.to(E4M3).double().t()
    products = [(a.bfloat16() @ b.bfloat16().t()), float8_product(a.bfloat16(), b.bfloat16(), E4M3), unscaled]
    exact = a @ b.t()
    return [f"{k:,}", *(f"{(each.double() - exact).norm() / exact.norm():.1%}" for each in products)]


def share(name: str, length: int) -> list[str]:
    """Shares of a forward's multiplications, of which those of o_proj and the MLP are in float8."""
    model = load_model_config(Model(name=name))
    width, layers = model.num_attention_heads * model.head_dim, model.num_hidden_layers
    in_float8 = layers * model.hidden_size * (width + 3 * model.intermediate_size)
    others = layers * model.hidden_size * (width + 2 * model.num_key_value_heads * model.head_dim)
    attention, head = layers * width * length, model.hidden_size * model.vocab_size  # half of the scores are masked
    parts = in_float8, others, attention, head
    return [name, f"{length:,}", *(f"{part / sum(parts):.0%}" for part in parts)]


def main() -> None:
    x = torch.tensor([0.0004, -0.003, 0.01, 0.25, -1.0])
    rows = [["x", *(f"{each:g}" for each in x.tolist()), "scale"]]
    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        values, scale = quantise(x, dtype)
        rows.append([f"x / scale in {name}", *(f"{each:g}" for each in values.float().tolist()), f"{scale:.3g}"])
        rows.append([f"times the scale, {name}", *(f"{each:.3g}" for each in (values.float() * scale).tolist()), ""])
    print(text_table(rows, first_number=1))
    print("\nRelative error of a product of random matrices with standard deviation 0.01:\n")
    print(text_table([["k", "bfloat16", "float8", "float8 without scales"], *map(errors, (64, 1024, 8192))], 0))
    print("\nShare of a forward's multiplications:\n")
    header = ["model", "tokens", "MLP, o_proj", "q, k, v", "attention", "head"]
    models = ("docs/llama-3.2-1b", "docs/llama-3.1-8b", "docs/llama-3.1-70b")
    print(text_table([header, *(share(name, 8192) for name in models)], first_number=1))


if __name__ == "__main__":
    main()
