"""A run as a process with outputs: its start and end, its folder, its metrics."""
