"""Data: documents and samples become tokens, tokens become rows, rows become micro-batches."""
