"""Slurm's commands and their answers. Nothing here knows what a run is."""
