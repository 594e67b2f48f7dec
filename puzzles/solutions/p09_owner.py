"""Solution of puzzle 9: zigzag. A chunk from the beginning and one from the end are together as much work as any."""


def owner(chunk: int, cp: int) -> int:
    return min(chunk, 2 * cp - 1 - chunk)
