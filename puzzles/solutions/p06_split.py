"""Solution of puzzle 6."""


def split(name: str, rank: int, tp: int, H: int, K: int, d: int, F: int) -> tuple[int, int, int]:
    if name in ("k_proj", "v_proj"):
        heads = max(1, K // tp)
        first = rank * K // tp  # with tp > K, tp / K neighbouring ranks have the same one
        return 0, first * d, (first + heads) * d
    size = H * d if name in ("q_proj", "o_proj") else F
    dimension = 1 if name in ("o_proj", "down_proj") else 0
    return dimension, rank * size // tp, (rank + 1) * size // tp
