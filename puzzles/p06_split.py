"""Puzzle 6, tensor: which part of each matrix a rank holds.

To read: docs/tensor_parallel.md, "Column-parallel and row-parallel matrices". Check your answer with
`python -m puzzles 6`.
"""


def split(name: str, rank: int, tp: int, H: int, K: int, d: int, F: int) -> tuple[int, int, int]:
    """Return which part of a weight tensor-parallel rank `rank` of tp holds: (dimension, start, stop).

    The weights are stored as in `torch.nn.Linear`, with a row for each output: with hidden size D, H query heads and K
    key/value heads of size d, and F hidden units of the MLP, q_proj is (H d, D), k_proj and v_proj (K d, D), o_proj
    (D, H d), gate_proj and up_proj (F, D), down_proj (D, F). A rank holds rows (dimension 0) or columns (dimension 1)
    start to stop - 1 of each matrix, so that every block needs only one sum over the ranks, at its end.

    Rank 0 has the first heads and units, and so on. Query heads i H/K to (i + 1) H/K - 1 attend to key/value head i. tp
    divides H and F. If tp is larger than K, neighbouring ranks hold the same key/value head.
    """
    raise NotImplementedError
