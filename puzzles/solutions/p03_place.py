"""Solution of puzzle 3."""


def place(sample: int, B: int, m: int, dp: int) -> tuple[int, int, int, int]:
    step, rest = divmod(sample, B * m * dp)
    micro_batch, rest = divmod(rest, B * dp)
    dp_rank, row = divmod(rest, B)
    return step, micro_batch, dp_rank, row
