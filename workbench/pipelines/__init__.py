"""Pipelines with any schedule and of any modules: plans, the executor, records of their actions."""
