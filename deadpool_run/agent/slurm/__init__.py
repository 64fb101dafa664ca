"""Slurm's description of a job, read from its environment. Pure; spec and the command line import it."""
