"""Pipeline parallelism: the layers are split over the pp ranks, and micro-batches flow through them."""
