"""Data parallelism: the batch is split over the dp ranks, and with ZeRO also the optimizer, gradients and weights."""
