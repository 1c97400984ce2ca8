"""Fixtures for tests on a real Slurm. A conftest.py loads them: `pytest_plugins = ["slurmbox.pytest_plugin"]`.

    xdist controller -- directory, pid --> workers: the first that needs `slurm` starts the cluster in the directory
    at its end: Cluster.down               (the cluster's guard does it if the controller is killed)

Without Slurm's programs the tests are skipped; with JOBKIT_REQUIRE_SLURM in the environment they fail.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from .cluster import Cluster, MissingPackages
from .processes import ClusterError, wait_until

SHARED = pytest.StashKey[str]()
USERS = ("jobkit-a", "jobkit-b")
GROUP = "jobkit-users"


class SharedCluster(Cluster):
    """A cluster whose nodes have jobs of several tests at a time."""

    def preempt(self, job_id: str | int) -> NoReturn:
        raise ClusterError(f"preempting job {job_id} would end other tests' jobs on its nodes: use make_slurm")


def shared_cluster(config: pytest.Config) -> tuple[str, int]:
    """Return the directory of the shared cluster, and the process whose end is the cluster's end."""
    if place := getattr(config, "workerinput", {}).get("slurmbox"):
        directory, owner = place
        return directory, owner
    # In /tmp and not in pytest's folder, which is too long for sockets.
    return config.stash.setdefault(SHARED, f"/tmp/slurmbox-{uuid.uuid4().hex[:12]}"), os.getpid()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell an xdist worker where the shared cluster is; called in the controller."""
    node.workerinput["slurmbox"] = shared_cluster(node.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the shared cluster; the controller does it for all its workers, which have ended by then."""
    if directory := config.stash.get(SHARED, None):
        Cluster(directory).down()


@contextlib.contextmanager
def skip_without_slurm() -> Iterator[None]:
    """Skip the test if Slurm's programs are missing, or fail it if JOBKIT_REQUIRE_SLURM is set."""
    try:
        yield
    except MissingPackages as error:
        if os.environ.get("JOBKIT_REQUIRE_SLURM"):
            pytest.fail(f"JOBKIT_REQUIRE_SLURM is set. {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def slurm_settings() -> dict[str, Any]:
    """Settings of the shared cluster; a conftest.py may give others."""
    return {}


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest, slurm_settings: dict[str, Any]) -> Cluster:
    """A cluster that all tests and xdist workers share: do not break its nodes or its controller."""
    directory, owner = shared_cluster(request.config)
    cluster = SharedCluster(directory, **slurm_settings)
    with skip_without_slurm():
        cluster.up(owner)
    return cluster


@pytest.fixture
def make_slurm() -> Iterator[Callable[..., Cluster]]:
    """A function that starts a cluster for this test alone: `make_slurm(nodes=2, cred_expire=5)`."""
    with contextlib.ExitStack() as clusters:

        def make(**settings: Any) -> Cluster:
            directory = tempfile.mkdtemp(prefix="slurmbox-", dir="/tmp")
            with skip_without_slurm():
                return clusters.enter_context(Cluster(directory, **settings))

        yield make


@pytest.fixture(scope="session")
def slurm_users() -> tuple[str, str]:
    """Two local users with a common group, jobkit-users, made if missing; skips the test unless root runs it."""
    if os.getuid() != 0:
        pytest.skip("only root can run commands as other users")

    def complete() -> bool:
        # Workers may come here at the same time: whoever does not get the lock of /etc/passwd tries again.
        subprocess.run(["groupadd", "--force", GROUP], capture_output=True)
        for user in USERS:
            subprocess.run(["useradd", "--create-home", "--groups", GROUP, user], capture_output=True)
        with contextlib.suppress(KeyError):
            return [pwd.getpwnam(user).pw_name for user in USERS] == sorted(grp.getgrnam(GROUP).gr_mem)
        return False

    wait_until(complete, "useradd")
    return USERS
