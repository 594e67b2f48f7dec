"""Context parallelism: every sequence is split over the cp ranks."""
