"""Data: tokens become rows, and rows become micro-batches."""
