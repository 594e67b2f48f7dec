"""Output of programs on the terminal."""

import errno
import logging
import os
import sys

READER_IS_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, such as `| head`, or a closed terminal


def print_line(line: str, end: str = "\n") -> None:
    """Print a line. Once the terminal or the reader of a pipe is gone, output is dropped, and the program continues."""
    try:
        print(line, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno not in READER_IS_GONE:
            print(
                f"the standard output cannot be written: {error.strerror}; the rest of it is dropped", file=sys.stderr
            )


class LinePrinter(logging.Handler):
    """Print each record to the standard output, see `print_line`."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(self.format(record))
