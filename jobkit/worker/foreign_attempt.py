"""An attempt under a launcher that is not jobkit's: torchrun, mpirun, srun, or plain python.

    rank 0: run directory, journal, lease --number--> all ranks --> ... --> rank 0: the attempt's end
                                      --lease, config--> the first rank of each other disk

No supervisor is there, so that rank 0 writes the journal, and a thread of it reads the requests of commands. Where rank
0 is killed, the next attempt closes this one. All ranks get the variables of torchrun, whichever program started them.
script.py and __main__.py call it.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from jobkit.addresses import own_addresses
from jobkit.checkpoint.disks import disks_of
from jobkit.config import machine, yamlfile
from jobkit.config.load import Loaded
from jobkit.config.schema import Config, Resources
from jobkit.errors import InputError
from jobkit.log import log
from jobkit.loop.join import Joined, join, leave
from jobkit.loop.rank import Rank
from jobkit.run import records, secrets
from jobkit.run.files import user_name, write_atomic
from jobkit.run.journal import Journal
from jobkit.run.locks import Lock
from jobkit.run.records import RankReport, Submitted, new_token
from jobkit.run.rundir import RunDir
from jobkit.run.status import UNDER_WAY, State
from jobkit.run.view import view
from jobkit.supervisor import attempt
from jobkit.supervisor.closing import REQUESTS, request_of
from jobkit.supervisor.diagnosis import Facts
from jobkit.supervisor.lease import HeldLease, ThisJob
from jobkit.supervisor.retry import RestartOptions
from jobkit.usage import to_type
from jobkit.wire.group import RankGroup
from jobkit.wire.messages import RankExited
from jobkit.wire.pages import VARIABLE, Page
from jobkit.wire.signals import take_stop_signals
from jobkit.worker.launchers import Launch
from jobkit.worker.rendezvous import Reservation

REQUEST_SECONDS = 1.0
"""Between two looks for requests."""


@dataclass
class ForeignAttempt:
    """A rank of such an attempt."""

    rank: Rank
    joined: Joined
    held_lease: HeldLease | None
    """Rank 0's right to write the journal."""
    alive: Lock | None
    """Rank 0 holds it until it ends: it proves to others that the attempt lives."""
    port: Reservation | None
    """Rank 0's MASTER_PORT, where the launcher gave none."""

    def close(self, end: RankReport, code: int) -> None:
        """Journal the end of the attempt, on rank 0."""
        if self.held_lease is None:
            return
        host, step = socket.gethostname(), -1 if end.step is None else end.step
        # The last save was made by all ranks together: they end alike.
        ranks = range(self.rank.world_size) if end.kind == "finished" else [0]
        exits = [RankExited(serial=1, attempt=self.rank.attempt, rank=rank, code=code, step=step) for rank in ranks]
        facts = Facts(exits=[(exited, host) for exited in exits])
        if end.kind == "stopped":
            submission = self.held_lease.journal.status.person_submission
            request = request_of(self.rank.run, submission, self.rank.attempt)
            facts.stop_reason = ("stopped" if request is None else REQUESTS[request.kind]), ""
        attempt.close(self.held_lease, facts, RestartOptions())


def begin(loaded: Loaded, run: RunDir, launch: Launch) -> ForeignAttempt | None:
    """Join the other ranks and begin an attempt; None where the run has finished already. All ranks call it.

    Raises DistributedError, and InputError where another process runs it, or where ranks were given other values.
    """
    topology = launch.topology
    config = with_topology(loaded.config, launch)
    page = Page.create()
    os.environ[VARIABLE] = str(page.descriptor)
    place = dataclasses.asdict(topology)
    del place["nodes"]
    rank = Rank(run=run, attempt=0, page=page, **place)
    rank.config = config
    file = None
    if launch.rendezvous == "file":
        file = run.path.parent / ".locks" / f"launch-{launch.key}"
        file.parent.mkdir(parents=True, exist_ok=True)
    joined = join(rank, file=file)
    port = _export_place(launch, joined.ranks)
    _check_same_run(loaded.config, run, joined.ranks)
    if rank.local_rank == 0 and (idle := machine.idle_devices(config, rank.local_world_size)):
        log.warning("%s", idle)
    disks = _disks(rank, joined.ranks)
    launched = ForeignAttempt(rank, joined, None, None, port)

    def start() -> int | None:
        return _begin(launched, dataclasses.replace(loaded, config=config), launch)

    number = joined.ranks.on_main(start)
    if number is None:
        leave()
        return None
    rank.attempt = number
    rank.config = dataclasses.replace(config, seed=joined.ranks.broadcast(rank.config.seed))
    _prepare_disks(rank, dataclasses.replace(loaded, config=rank.config), joined.ranks, disks)
    os.environ.update(JOBKIT_RUN=str(run.path), JOBKIT_ATTEMPT=str(rank.attempt))
    take_stop_signals(page, ctrl_c=True)
    if launched.held_lease is not None:
        submission = launched.held_lease.journal.status.person_submission
        threading.Thread(target=_watch_requests, args=(rank, submission), daemon=True).start()
    return launched


def _begin(launched: ForeignAttempt, loaded: Loaded, launch: Launch) -> int | None:
    """On rank 0: write the files of a submission, and begin the attempt; returns its number, None if it is finished."""
    run = launched.rank.run
    with run.submit_lock():
        before = view(run, locked=True)
        if before.state == State.FINISHED:
            print(f"already finished: {run.path}\nfor a new run: another name, or other params", flush=True)
            return None
        last = before.status.submitted
        # A launcher gives the ranks to another host if theirs is lost: it has ended those of before.
        is_again = last is not None and last.launcher is not None and before.elsewhere
        if before.state in UNDER_WAY and not is_again:
            raise InputError(f"{run.name} is {before.state} already: {before.words}; {to_type('status', run.path)}")
        for path in (run.path, run.submitit, run.checkpoints, run.tensorboard, run.path / "requests"):
            path.mkdir(parents=True, exist_ok=True)
        run.refuse_foreign()
        launched.alive = run.alive_lock().__enter__()
        launched.alive.leave_to_parent()
        loaded = run.with_kept_seed(loaded)
        launched.rank.config = loaded.config
        write_atomic(run.config_file, yamlfile.dump(loaded.written))
        journal = Journal(run)
        if last is None and (line := secrets.warning(loaded.written["params"])):
            log.warning("%s", line.removeprefix("warning: "))
        number = last.number + 1 if last is not None else 1
        token = new_token(run.name, number)
        journal.append(
            Submitted(
                token=token,
                number=number,
                scheduler="local",
                launcher=launch.launcher,
                user=user_name(),
                host=socket.gethostname(),
                folder=str(Path.cwd()),
                config={key: loaded.written[key] for key in ("name", "seed", "params")},
            )
        )
    launched.held_lease = attempt.take_over(run, ThisJob(job_id=f"local-{os.getpid()}", token=token))
    return attempt.begin(launched.held_lease, [], launch.topology.world_size)


def _export_place(launch: Launch, ranks: RankGroup) -> Reservation | None:
    """Set the variables of torchrun for libraries and for processes that a script starts.

    Where the launcher named no address, rank 0 chooses one, and keeps the port that is returned.
    """
    topology, port = launch.topology, None
    if ranks.is_main and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        port = Reservation()
        os.environ.update(MASTER_ADDR=own_addresses(topology.nodes)[0], MASTER_PORT=str(port.port))
    address = ranks.broadcast({name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")})
    os.environ.update(
        address,
        RANK=str(topology.rank),
        WORLD_SIZE=str(topology.world_size),
        LOCAL_RANK=str(topology.local_rank),
        LOCAL_WORLD_SIZE=str(topology.local_world_size),
        GROUP_RANK=str(topology.node),
    )
    return port


def _check_same_run(config: Config, run: RunDir, ranks: RankGroup) -> None:
    """Raise InputError, on all ranks, where the command of another machine has other values."""
    everyones = ranks.gather((run.name, {key: repr(value) for key, value in config.params.items()}))
    name, params = everyones[0]
    for rank, (other, others) in enumerate(everyones):
        if other != name:
            keys = sorted(key for key in {**params, **others} if params.get(key) != others.get(key))
            words = f"params.{keys[0]} is another" if keys else f"its run is {other}, and rank 0's is {name}"
            raise InputError(
                f"rank {rank} was given other values than rank 0: {words}; all ranks are one run: give all machines "
                "the same command, and leave out of the params what differs between ranks"
            )


def _disks(rank: Rank, ranks: RankGroup) -> tuple[tuple[int, ...], ...]:
    """Return the ranks by disk; nothing where all share a disk.

    Raises InputError, on all ranks, where machines that share none would keep a part of the state each.
    """
    folder, spread = rank.run.path.parent, rank.config.parallel
    if rank.local_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    disks = disks_of(folder, rank, ranks)
    if disks and (spread.data, spread.tensor, spread.pipeline) != ("ddp", 1, 1):
        hint = f"let {folder} be one folder for all machines, or take ddp"
        raise InputError("no machine would have the whole state on its disk", key="parallel", hint=hint)
    return disks


def _prepare_disks(rank: Rank, loaded: Loaded, ranks: RankGroup, disks: tuple[tuple[int, ...], ...]) -> None:
    """Write the files that ranks read, on each disk that is not rank 0's."""
    lease = ranks.broadcast(rank.run.lease() if ranks.is_main else None)
    if rank.rank in [disk[0] for disk in disks[1:]]:
        rank.run.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomic(rank.run.config_file, yamlfile.dump(loaded.written))
        records.write(rank.run.lease_file, lease)
    if disks and ranks.is_main:
        log.info("the machines share no disk: each has whole checkpoints in its %s", rank.run.path)
    ranks.barrier()


def with_topology(config: Config, launch: Launch) -> Config:
    """Return the config with the launcher's number of ranks: it decides, not the YAML."""
    topology = launch.topology
    gpus = config.resources.gpus_per_task
    if not isinstance(gpus, int):
        import torch

        gpus = int(torch.accelerator.is_available())
    resources: Resources = dataclasses.replace(
        config.resources, nodes=topology.nodes, tasks_per_node=topology.local_world_size, gpus_per_task=gpus
    )
    return dataclasses.replace(config, resources=resources)


def _watch_requests(rank: Rank, submission: int) -> None:
    """In a thread of rank 0: a request of a command stops the run."""
    while request_of(rank.run, submission, rank.attempt) is None:
        time.sleep(REQUEST_SECONDS)
    rank.page.ask_to_stop()
