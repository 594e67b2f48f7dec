"""Costs of a layout before it runs: messages and time."""
