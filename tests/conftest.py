"""Fixtures that several test files share."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from harness.quick_slurm import QUICK
from harness.reference import weights_of
from slurm_cluster import Cluster, MissingPackages, wait_until
from xdist.scheduler import LoadScopeScheduling

from jobkit.log import log
from jobkit.supervisor.parents import TASK_MODULES, WARM_PARENT, Parent

WARM_MODULES = (
    *(*TASK_MODULES, "jobkit.worker.script", "jobkit.worker.metrics", "safetensors.torch"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "harness.ranks", "pytest"),
)
"""Beside a task's, what groups of ranks and their tests import."""

WAIT_LONGEST = ("test_adopted_on_slurm.py", "test_resume.py")
"""Files with a test of more than two minutes, most of which it waits: nothing could be done beside one that is last."""

WARM = pytest.StashKey[Parent]()


def pytest_configure(config: pytest.Config) -> None:
    """One process imports torch for all local runs of a session, whichever of its workers starts them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Before anything imports torch. Its threads, one a core in each of the tests' processes, spin while they wait for
    # each other: a test of 3 s took 250 s beside others.
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    # scikit-learn sets these when it is imported, in the processes of some tests: a warm server with others refuses.
    os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
    os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # as in each run
    # Where the environment says PYTHONDONTWRITEBYTECODE, each process would compile 170 modules: 0.3 s.
    for folder in ("jobkit", "tests", "tools"):
        compileall.compile_dir(Path(__file__).parents[1] / folder, quiet=2)
    path = f"{tempfile.mkdtemp(prefix='jobkit-warm-')}/socket"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # As in each test's project and run: what a library reads at its import cannot be changed afterwards.
    config.stash[WARM] = Parent.start(environment, WARM_MODULES)
    config.stash[WARM].listen(path)
    os.environ[WARM_PARENT] = path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, then what waits for Slurm beside what keeps the cores busy, and last what fills the
    gaps."""
    parts = {"recipes": 1, "ranks": 2, "slurm": 3, "local": 3, "unit": 4}
    count = Counter(item.path.parent.name for item in items)
    seen: Counter[str] = Counter()
    order: dict[pytest.Item, tuple[int, float]] = {}
    for item in items:
        folder = item.path.parent.name
        seen[folder] += 1
        among = 0 if item.path.name in WAIT_LONGEST or parts.get(folder) != 3 else seen[folder] / count[folder]
        order[item] = parts.get(folder, 0), among
    items.sort(key=order.__getitem__)


class InOrder(LoadScopeScheduling):
    """Whichever process is free takes the next test, or a whole file where its tests share what takes long to make."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if Path(file).parent.name in ("recipes", "ranks") else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InOrder:
    """That of `-n`."""
    config.option.loadscopereorder = False
    return InOrder(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End it with the session."""
    if client := config.stash.get(WARM, None):
        client.close()
        shutil.rmtree(Path(os.environ.pop(WARM_PARENT)).parent)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """The weights of the toy task after a training without interruptions, by the number of ranks."""
    return cache(partial(weights_of, tmp_path_factory))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A real Slurm cluster of four nodes, one for each test process; jobs are cancelled when it ends."""
    # Not tmp_path: Slurm's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="jobkit-slurm-", dir="/tmp") as directory:
        cluster = Cluster(directory, **QUICK)
        try:
            cluster.up()
        except MissingPackages as missing:
            if os.environ.get("JOBKIT_REQUIRE_SLURM") == "1":
                pytest.fail(str(missing))
            pytest.skip(f"no Slurm on this machine; {missing}")
        try:
            yield cluster
        finally:
            cluster.down()


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Undo what a command in the test's own process set up: pytest records a logger that keeps its lines to itself,
    and a later test that lets them through would see each twice."""
    handlers, level, propagates = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:] = handlers
    log.setLevel(level)
    log.propagate = propagates


@pytest.fixture(autouse=True)
def _empty_queue(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel what a test leaves on the cluster that it shares with others: its jobs would take their nodes."""
    yield
    if "slurm" not in request.fixturenames:
        return
    cluster: Cluster = request.getfixturevalue("slurm")
    left = cluster.command("squeue", "-h", "-o", "%F").splitlines()
    if left:
        cluster.command("scancel", *set(left))
        wait_until(lambda: not cluster.command("squeue", "-h"), "an empty queue")


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory for a Slurm of one test's own: its sockets need a short path."""
    if shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") is None:
        if os.environ.get("JOBKIT_REQUIRE_SLURM") == "1":
            pytest.fail("slurmctld is not installed")
        pytest.skip("no Slurm on this machine")
    with tempfile.TemporaryDirectory(prefix="jobkit-slurm-", dir="/tmp") as directory:
        yield Path(directory) / "s"
