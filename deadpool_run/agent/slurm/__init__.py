"""Slurm: a job's description, read from its environment, and its commands."""
