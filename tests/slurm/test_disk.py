"""A disk without room: the nodes go back, nothing is requeued or excluded, and the same command continues.

Slurm's record of the job, and the mounted file system, are the oracles.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.runs import Project, wait_until
from harness.small_disk import SmallDisk
from slurmbox import Cluster

SHORT = """
from jobkit import disk
disk.FULL_DISK_SECONDS = 3.0
"""


@pytest.mark.parametrize("kind", ["full", "inodes", "read-only"])
def test_a_job_whose_disk_takes_nothing_gives_its_nodes_back(
    slurm: Cluster, on_slurm: Callable[..., Project], kind: str
) -> None:
    project = on_slurm(slurm)
    project.begin_with("jobkit.supervisor.main", SHORT)
    with SmallDisk(project.folder / "runs") as disk:
        notify = ["--notify", 'echo "$JOBKIT_STATE $JOBKIT_ERROR" >told']
        launch = project.submit("--cluster", "slurm", f"name=disk-{kind}", *notify, steps=100_000).wait_for_step(20)
        job_id = str(launch.status.job_id)
        spoil, mend = {
            "full": (disk.fill, disk.empty),
            "inodes": (disk.use_all_inodes, disk.free_inodes),
            "read-only": (disk.make_read_only, disk.make_writable),
        }[kind]
        spoil()
        launch.kill_rank(0)  # its end cannot be journalled, nor the next attempt begin
        record = wait_until(lambda: (job := slurm.job(job_id))["JobState"] == "FAILED" and job, "the end of the job")
        assert (record["ExitCode"], record["Restarts"], record["ExcNodeList"]) == ("75:0", "0", "(null)")
        assert (project.folder / "told").read_text().startswith("interrupted [Errno ")
        waited = project.jobkit("wait", launch.run.name, check=False)
        assert (waited.returncode, "the same command continues the run" in waited.stdout) == (75, True)
        refused = project.jobkit("submit", str(project.yaml), "--cluster", "slurm", f"name=disk-{kind}", check=False)
        assert refused.returncode == 2
        mend()
        launch = project.submit("--cluster", "slurm", f"name=disk-{kind}", steps=100_000).wait_for_step(20)
        launch.end_training().wait_until_over()
        assert (launch.status.state, launch.causes[1:]) == ("finished", ["finished"])
