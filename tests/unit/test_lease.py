"""An attempt that has lost its lease ends."""

from __future__ import annotations

import subprocess
import sys

from jobkit.errors import EXIT_RESUMABLE

SCRIPT = """
import os, sys, threading, time
from jobkit.worker.lease import LostLease, end_after_lost_lease

reader, writer = os.pipe()
os.close(reader)
sys.stdout = os.fdopen(writer, "w", buffering=1 << 16)
sys.stdout.write("not written yet")
thread = threading.Thread(target=lambda: end_after_lost_lease(LostLease("attempt 2 has taken the run over")))
thread.start()
thread.join()
os._exit(0)
"""


def test_a_process_that_has_lost_the_lease_ends_even_where_nobody_reads_its_output() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert ended.returncode == EXIT_RESUMABLE, ended.stderr
