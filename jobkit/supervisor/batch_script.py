"""What the batch script (submission/job.sh) and the supervisor in it agree on.

A file of its own: a submission writes the script and needs nothing else of the supervisor in a job.
"""

from __future__ import annotations

EXIT_DECIDED = 76
"""The supervisor's exit code where the run has failed: nothing is left to try. Python itself exits with 1 for a bug."""

EXIT_START_AGAIN = 77
"""The supervisor's exit code where the job is to be started again: by `end`, after the user's teardown."""

BLIND_RESTARTS = 50
"""After how many restarts of a job, of whatever cause, it no longer starts again without knowing why.

Each waits two minutes in the queue (AuthInfo cred_expire, 120 s): a file server may be away for more than an hour.
"""
