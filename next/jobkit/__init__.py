"""jobkit: submit PyTorch training to a workstation or a Slurm cluster; whatever interrupts it, it continues."""

__version__ = "0.2.0"
