"""Tensor parallelism: every weight matrix is split over the tp ranks."""
