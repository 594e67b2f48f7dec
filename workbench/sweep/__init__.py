"""Sweeps: many configs, as jobs on this machine or on Slurm."""
