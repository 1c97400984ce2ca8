"""How a private Slurm differs from Slurm's defaults for tests that wait until a run goes on."""

from __future__ import annotations

QUICK = {"cred_expire": 5, "slurmd_timeout": 20}
"""Settings of a Cluster, in seconds.

A requeued job waits cred_expire + 1 s in BeginTime, and a lost node is one after slurmd_timeout: with Slurm's own 120
and 300 each such test would take minutes longer, and show nothing more. Whoever measures how long a run takes to go on
takes Slurm's own instead.
"""

NO_ANSWER = {"message_timeout": 3}
"""For clusters whose controller is stopped: a command that asks it gives up after three seconds, not after ten."""
