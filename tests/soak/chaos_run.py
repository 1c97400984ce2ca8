"""One run that chaos.py interrupts: submits it, watches it, finds its processes and judges how it went."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_plan import EVERY, KINDS, RANKS, RECOVERY, SAVING, STEPS, TOGETHER, Event
from harness.processes import processes_of, ranks_of
from harness.project import Project, describe, events, logged_steps, queue, status, weights
from slurm_cluster import Cluster, ClusterError, Process, process_table

PATIENCE = 240.0
"""Seconds that a run may take to react to anything."""

ORDERS = '''\
"""Lets a rank of the toy task misbehave to order, and says when each step was done."""
import json
import time


def at_step(ctx, step):
    control = ctx.run_dir.parent / ".control"
    if (control / "order.json").exists():
        obey(ctx, json.loads((control / "order.json").read_text()))
    with open(ctx.run_dir / f"trained_{ctx.rank}.txt", "a") as file:
        file.write(f"{ctx.attempt} {step} {time.time():.3f}\\n")
    if not (control / "hurry").exists():
        time.sleep(0.1)


def obey(ctx, order):
    if (order["attempt"], order["rank"]) != (ctx.attempt, ctx.rank):
        return
    if order["what"] == "raise":
        raise RuntimeError(f"ordered in attempt {ctx.attempt}")
    while order["what"] == "loop":
        pass
    while order["what"] == "sleep":
        time.sleep(1)
    bytearray(1 << 60)
'''

YAML = """\
name: chaos
task: mytask:train
params: {{steps: {steps}, workers: {workers}}}
resources: {{nodes: 2, tasks_per_node: 2, time: "{time}"}}
checkpoint: {{every: {every}}}
watchdog: 15s
retry: {{exclude_after: 1000}}  # it is not the nodes' fault here
clusters: {{slurm: {{partition: low}}}}
"""


Say = Callable[[str], None]


class Stuck(Exception):
    """The run does not do what it should, and never will."""


@dataclass
class Row:
    """What one interruption did."""

    event: Event
    attempt: int
    time: float
    intact: list[int]
    """Steps with a good checkpoint at that moment."""
    cause: str = ""
    """What the product says of it."""
    error: str = ""
    reached: int = 0
    """Steps done by then."""
    resumed: int | None = None
    """Step that training went on from; None where it did not."""
    repeated: int = 0
    attempts: int = 0
    """How many it took until the run trained again."""
    began: str = ""
    """How the first of them began, as `in place`."""
    seconds: float | None = None
    """Until it trained again."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.1f} s"
        resumed = "never" if self.resumed is None else str(self.resumed)
        words = f"{self.event.number:3} {self.event.kind:16} {self.event!s:26} attempt {self.attempt:2}"
        words += f"  {self.cause or '-':13} {self.began:10}"
        words += f" {self.reached:5} -> {resumed:5} {self.repeated:3} repeated {seconds:>8}"
        return words + "".join(f"  !! {problem}" for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Live:
    """A run under interruptions, on `cluster`, or on this machine where that is None."""

    def __init__(self, path: Path, cluster: Cluster | None, steps: int, plan: list[Event]) -> None:
        self.project = Project(path, cluster.env if cluster else None)
        self.on_slurm, self._cluster = cluster is not None, cluster
        self.steps = steps
        limit = "0:01:00" if any(event.kind == "time_limit" for event in plan) else "0:30:00"
        workers = int(any(event.kind == "kill_worker" for event in plan))
        (path / "orders.py").write_text(ORDERS)
        (path / "toy.yaml").write_text(YAML.format(steps=steps, workers=workers, time=limit, every=EVERY))
        self.control = path / "runs/.control"  # not part of the code, which each submission takes a snapshot of
        self.control.mkdir(parents=True)
        self.rows: list[Row] = []
        self.by_hand: list[int] = []
        """Attempts after which the run had to be submitted again although nobody had stopped it."""
        self.away = False
        """The cluster's controller has been stopped."""
        self._foreground: subprocess.Popen[Any] | None = None
        self._chores: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self._ranks: tuple[int, dict[int, Process]] = (0, {})
        self._damaged: dict[int, float] = {}
        self._seen_in_queue = time.monotonic()

    # What the kinds of interruptions use

    @property
    def run(self) -> Path:
        return self.project.runs[0]

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def foreground(self) -> subprocess.Popen[Any]:
        assert self._foreground is not None
        return self._foreground

    @property
    def attempt(self) -> int:
        """The newest; 0 before there is one."""
        return next((e["attempt"] for e in reversed(self.journal()) if e["event"] == "started"), 0)

    @property
    def job_id(self) -> str:
        return next(str(e["job_id"]) for e in reversed(self.journal()) if e["event"] == "started")

    def journal(self) -> list[dict[str, Any]]:
        return events(self.run) if self.project.runs else []

    def command(self, *arguments: str) -> None:
        self.project.jobkit(*arguments)

    def order(self, what: str, rank: int) -> None:
        """Have a rank of this attempt do something at its next step."""
        temporary = self.control / "order.tmp"
        temporary.write_text(json.dumps({"what": what, "rank": rank, "attempt": self.attempt}))
        temporary.replace(self.control / "order.json")

    def ranks(self) -> dict[int, Process]:
        """The newest attempt's processes by rank, once all of them are there."""
        attempt = self.attempt
        if self._ranks[0] != attempt:
            self._ranks = (attempt, {})
        deadline = time.monotonic() + 30
        while len(self._ranks[1]) < RANKS and self.attempt == attempt and time.monotonic() < deadline:
            self._ranks[1].update(ranks_of(self.run, attempt))
        return self._ranks[1]

    def rank(self, number: int) -> Process:
        if number not in (ranks := self.ranks()):
            raise ClusterError(f"rank {number} is not there")
        return ranks[number]

    def of_job(self, wanted: Callable[[Process], bool]) -> list[Process]:
        """Processes that this Slurm started for this job, or that wait for it."""
        own = {f"SLURM_CONF={self.cluster.conf}", f"SLURM_JOB_ID={self.job_id}"}
        found = [one for one in process_table().values() if wanted(one) and own <= one.environment()]
        if not found:
            raise ClusterError("no such process of this job")
        return found

    def intact(self) -> list[int]:
        """Steps whose checkpoint is there and was not damaged since it was written."""
        names = [path.name[5:] for path in self.run.glob("checkpoints/step_*")]
        written = {e["step"]: e["time"] for e in self.journal() if e["event"] == "checkpoint"}
        found = sorted(int(name) for name in names if name.isdigit())
        return [step for step in found if self._damaged.get(step, -1) < written.get(step, 0)]

    def damage(self, step: int) -> None:
        self._damaged[step] = time.time()

    def later(self, seconds: float, ready: Callable[[], bool], action: Callable[[], object]) -> None:
        """Do something so many seconds after `ready()` was first true."""
        since: list[float] = []

        def due() -> bool:
            if not since and ready():
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] >= seconds

        self._chores.append((due, action))

    def has_reacted(self, attempt: int) -> bool:
        """Whether the product, or Slurm, knows that an attempt has ended."""
        ended = any(one["id"] == attempt and one["cause"] for one in status(self.run).get("attempts", []))
        return ended or self.attempt > attempt or self.cluster.job(self.job_id).get("JobState") != "RUNNING"

    def bring_controller_back(self) -> None:
        self.cluster.start_controller()
        self.away = False

    # From the first submission to the end

    def submit(self) -> None:
        if self.on_slurm:
            self.project.submit("--cluster", "slurm", expect=None)
            self._seen_in_queue = time.monotonic()
            return
        with (self.project.path / "foreground.log").open("ab") as log:
            command = [sys.executable, "-m", "jobkit", "submit", "toy.yaml", "--local"]
            self._foreground = subprocess.Popen(
                command, cwd=self.project.path, env=self.project.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def tend(self) -> None:
        """Do what is due, and submit the run again where it has ended too early."""
        for chore in list(self._chores):
            if chore[0]():
                self._chores.remove(chore)
                chore[1]()
        if self.finished or self.away:
            return
        if self.on_slurm:
            if queue(self.cluster, self.project):
                self._seen_in_queue = time.monotonic()
            given_up = time.monotonic() - self._seen_in_queue > 8
        else:
            given_up = self.foreground.poll() is not None
        if given_up:
            stopped = [row for row in self.rows if row.attempt == self.attempt and KINDS[row.event.kind].by_hand]
            if not stopped:
                self.by_hand.append(self.attempt)
            self.submit()

    @property
    def finished(self) -> bool:
        return bool(self.project.runs) and status(self.run).get("state") == "finished"

    def wait(self, what: str, reached: Callable[[], Any], pause: float = 0.1) -> None:
        deadline, tended = time.monotonic() + PATIENCE, 0.0
        while not reached():
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: not within {PATIENCE:.0f} s; the run is {status(self.run).get('state')}")
            if time.monotonic() - tended > 1:
                self.tend()
                tended = time.monotonic()
            time.sleep(pause)

    def trained(self, rank: int = 0) -> list[tuple[int, int, float]]:
        """(attempt, step, time) of every step that a rank has done."""
        file = self.run / f"trained_{rank}.txt"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(line[0]), int(line[1]), float(line[2])) for line in lines if len(line) == 3]

    def done(self) -> int:
        """Steps done by the newest attempt."""
        attempt = self.attempt
        return sum(one[0] == attempt for one in self.trained()) if attempt else 0

    def interrupt(self, event: Event, fire: Callable[[Live, Event], object]) -> Row:
        """Wait for the moment of an event and let `fire` make it happen."""
        last = self.rows[-1].attempt if self.rows else 0
        name = f"attempt {last + 1}" if event.moment != TOGETHER else ""
        if event.moment != TOGETHER:
            self.wait(name, lambda: self.finished or self.attempt > last, pause=0.02)
        if event.moment in (STEPS, SAVING):
            self.wait(
                f"{name}, {event}",
                lambda: self.finished or self.done() >= event.steps,
            )
            self.ranks()
        if event.moment == SAVING:
            self.wait(f"{name}, a checkpoint being written", lambda: self.saving() or self.finished, pause=0.002)
        if self.finished:
            raise Stuck(f"finished before event {event.number}")
        if event.moment in (TOGETHER, RECOVERY):
            time.sleep(event.delay)
        row = Row(event, last if event.moment == TOGETHER else self.attempt, time.time(), self.intact())
        self.rows.append(row)
        try:
            fire(self, event)
        except (ClusterError, AssertionError, StopIteration, ValueError) as error:
            words = str(error).strip().splitlines()
            if event.moment != TOGETHER:  # else the one before was quicker
                row.problems.append(f"not fired: {words[-1] if words else error!r}")
        return row

    def saving(self) -> bool:
        return any(name.name.startswith(".staging_") for name in (self.run / "checkpoints").iterdir())

    def go(self, plan: list[Event], actions: Mapping[str, Callable[[Live, Event], object]], say: Say) -> None:
        """Submit the run and bring it through all events to its end; raises Stuck.

        `actions` has for each kind of event what makes it happen.
        """
        self.submit()
        self.wait("a run directory", lambda: self.project.runs)
        told = 0
        for event in plan:
            self.interrupt(event, actions[event.kind])
            told = self.tell(told, say)
        last = self.rows[-1].attempt
        self.wait("training after the last event", lambda: self.attempt > last and self.done())
        self.tell(told, say)
        (self.control / "hurry").touch()
        self.wait("the end", lambda: self.finished)
        self.wait("the end of chores", lambda: self.tend() or not self._chores)

    def tell(self, told: int, say: Say) -> int:
        """Print the rows from number `told` on after which the run has trained again; how many are printed now."""
        for row in self.rows[told:]:
            self.measure(row)
            if row.resumed is None:
                break
            say(str(row))
            told += 1
        return told

    # How it went

    def measure(self, row: Row) -> None:
        """Fill in what an interruption did, as far as it shows by now."""
        attempts = {one["id"]: one for one in status(self.run)["attempts"]}
        own = attempts.get(row.attempt, {})
        row.cause = str(own.get("cause") or "")
        row.error = next(
            (str(e.get("error")) for e in self.journal() if e.get("attempt") == row.attempt and e.get("error")), ""
        )
        steps = [step + 1 for rank in range(RANKS) for attempt, step, _ in self.trained(rank) if attempt == row.attempt]
        newest = max(row.intact, default=0)
        row.reached = max(steps, default=own.get("first_step") or newest)
        row.began = str(attempts.get(row.attempt + 1, {}).get("began") or "")
        after = [one for one in self.trained() if one[0] > row.attempt]
        if after:
            attempt, row.resumed, when = after[0]
            # The time limit strikes long after the event: it is when the attempt has ended.
            struck = own.get("ended") if row.event.kind == "time_limit" else row.time
            row.attempts, row.seconds = attempt - row.attempt, round(when - (struck or row.time), 1)
            row.repeated = max(0, row.reached - row.resumed)

    def check(self, row: Row) -> None:
        """Did it go on by itself, and not repeat more steps than it had to?"""
        if row.attempt in self.by_hand:
            row.problems.append("the run had to be submitted again")
        if row.resumed is None:
            row.problems.append("it never trained again")
            return
        kinds = [KINDS[other.event.kind] for other in self.rows if other.attempt == row.attempt]
        if all(kind.graceful for kind in kinds) and row.repeated:
            row.problems.append("it had the time for a checkpoint")
        if all(kind.in_place for kind in kinds) and row.began != "in place":
            row.problems.append(f"its nodes were given back: the next attempt was {row.began}")
        damaged = any(kind.damages for kind in kinds)
        # A checkpoint that was being written counts for nothing; the one before it, or before the damaged one, does.
        safe = ((row.reached - 1) // EVERY - 1 - damaged) * EVERY
        usable = row.intact[: -1 if damaged else None]
        if row.resumed < max([safe, *usable[-1:]]):
            row.problems.append(f"step {max([safe, *usable[-1:]])} was safe")

    def left_behind(self) -> list[str]:
        """Processes of this run that still live, and its jobs that are still queued."""
        found = [f"process {process.pid} ({process.name})" for process in processes_of(self.run)]
        return found + [f"job {job}" for job in (queue(self.cluster, self.project) if self.on_slurm else [])]

    def verdict(self, reference: bytes) -> list[str]:
        """What is wrong with how the whole run went; empty where all is well."""
        for row in self.rows:
            self.measure(row)
            self.check(row)
        wrong = [f"event {row.event.number} ({row.event.kind}): {one}" for row in self.rows for one in row.problems]
        fired = {row.attempt for row in self.rows}
        wrong += [f"attempt {one} ended without an event, for good" for one in self.by_hand if one not in fired]
        if not self.finished:
            return [*wrong, f"not finished: {status(self.run).get('state')}"]
        if weights(self.run) != reference:
            wrong.append("the weights differ from those of the uninterrupted run")
        if logged_steps(self.run) != list(range(self.steps)):
            wrong.append("TensorBoard's curve does not have each step once and in order")
        numbers = [e["attempt"] for e in self.journal() if e.get("attempt")]
        if numbers != sorted(numbers):
            wrong.append("an attempt wrote to the journal after its successor had started")
        try:
            self.wait("an end of all processes", lambda: not self.left_behind())
        except Stuck:
            wrong += [f"left behind: {one}" for one in self.left_behind()]
        return wrong

    def unasked(self) -> list[str]:
        """Attempts that ended although nothing had been done to them."""
        fired = {row.attempt for row in self.rows}
        ended = [one for one in status(self.run).get("attempts", []) if one["cause"] not in (None, "finished")]
        return [f"attempt {one['id']}: {one['cause']}" for one in ended if one["id"] not in fired]

    def abandon(self) -> str:
        """Stop a run that is stuck, by force; its journal and logs."""
        words = describe(self.run) if self.project.runs else "no run directory"
        if self.away:
            self.bring_controller_back()
        for job in queue(self.cluster, self.project) if self.on_slurm else []:
            self.cluster.command("scancel", "--signal=KILL", "--full", job)
            self.cluster.command("scancel", job)
        if self._foreground:
            self._foreground.kill()
        for process in processes_of(self.run):
            process.send(signal.SIGKILL)
        return words


def reference_weights(path: Path, steps: int) -> bytes:
    """The weights of the same training without interruptions, on this machine."""
    live = Live(path, None, steps, [])
    (live.control / "hurry").touch()
    live.project.submit("--local")
    return weights(live.run)
