"""Drawings of schedules and of recorded steps. Only the standard library."""
