"""Slurm's commands and their answers. Nothing here knows about runs."""
