"""A YAML and a command line become a Config. Nothing here knows a run, starts a process or asks Slurm."""
