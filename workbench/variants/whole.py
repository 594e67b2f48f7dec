"""Rows of a text with masked documents, and of a whole data set, for evaluations that count each target once."""

import logging

import numpy as np

from picotron.config import Config
from picotron.console import UserError
from picotron.data.loader import Row, Rows, TextRows
from workbench.run.token_files import Samples, Text

logger = logging.getLogger("picotron")


class MaskedRows(TextRows):
    """`TextRows` with the lengths of their documents.

    Args:
        end: token after which a new document begins; None: documents are not masked.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int, end: int | None) -> None:
        super().__init__(tokens, seq_length)
        self.end = end

    def __getitem__(self, i: int) -> Row:
        row = super().__getitem__(i)
        return row._replace(documents=self.documents(row.input_ids))

    def documents(self, input_ids: np.ndarray) -> np.ndarray | None:
        """Return the lengths of the documents in a row, if documents are masked, else None."""
        if self.end is None:
            return None
        ends = np.flatnonzero(input_ids[:-1] == self.end) + 1
        return np.diff(ends, prepend=0, append=self.seq_length)


class WholeText(MaskedRows):
    """The rows of a text up to its last token. The loss does not count the targets after it, which have token 0.

    Args:
        tokens, seq_length, end: see `MaskedRows`.
        multiple: number of which the number of rows is a multiple.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int, end: int | None, multiple: int) -> None:
        super().__init__(tokens, seq_length, end)
        targets, size = max(0, len(tokens) - 1), seq_length * multiple
        starts = np.arange(0, -(-targets // size) * size, seq_length)
        self.counts: np.ndarray = np.clip(targets - starts, 0, seq_length)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, i: int) -> Row:
        tokens = self.tokens[i * self.seq_length : (i + 1) * self.seq_length + 1]
        tokens = np.pad(tokens, (0, self.seq_length + 1 - len(tokens)))
        counted = np.arange(self.seq_length) < self.counts[i]
        return Row(tokens[:-1], tokens[1:], counted.astype(np.uint8), self.documents(tokens[:-1]))


def whole_rows(data: Text | Samples, config: Config, name: str) -> Rows:
    """Make the rows of a data set, a multiple of the global batch.

    Raises:
        UserError: the data have no target that the loss counts.
    """
    section, length, multiple = config.dataset, config.training.seq_length, config.global_batch_size
    rows: Rows
    if isinstance(data, Text):
        size, rows = f"{len(data.tokens):,} tokens", WholeText(data.tokens, length, data.end, multiple)
    else:
        from workbench.variants.samples import pack_samples

        packed = pack_samples(data, length, section.long_samples == "drop", section.masks_documents, multiple)
        size, rows = f"{len(data.lengths):,} samples, {packed.cut:,} cut and {packed.dropped:,} dropped", packed.rows
    if rows.counts is None or not rows.counts.sum():
        raise UserError(f"{name} has {size}, and nothing to evaluate; use other data")
    logger.info("%s for evaluation in %s", size, name)
    return rows
