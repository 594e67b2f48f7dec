"""Costs of a layout before it runs: memory, messages and time."""
