"""Tables in plain text."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], first_number: int | None = None) -> str:
    """Format rows of cells as aligned columns.

    Args:
        first_number: index of the first column of numbers. It and the columns after it are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = len(widths) if first_number is None else first_number
    lines = (
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
