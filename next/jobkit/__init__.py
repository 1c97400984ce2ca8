"""jobkit: submit PyTorch training to a workstation or a Slurm cluster; whatever interrupts it, it continues."""

__version__ = "0.2.0"

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "jobkit":
    # `python -m jobkit`, typed in a folder whose secrets.py or queue.py is not the standard library's.
    from jobkit.start import leave_current_folder

    leave_current_folder()
