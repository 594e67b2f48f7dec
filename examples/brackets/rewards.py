"""Reward of the toy task of examples/grpo.py: the answer to opening brackets, such as "([<", closes them: ">])"."""

import itertools

END = "."


def correct(prompt: str, completion: str) -> float:
    """Return the fraction of the answer, including its end, that is correct before the first mistake."""
    answer = prompt[::-1].translate(str.maketrans("([<", ")]>")) + END
    pairs = zip(answer, completion + END, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(answer)
