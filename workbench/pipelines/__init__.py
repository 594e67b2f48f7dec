"""Pipelines with any schedule and of any modules: plans, memory, the executor, records of their actions."""
