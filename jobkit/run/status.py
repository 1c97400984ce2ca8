"""The status of a run: a pure function of its journal, and of the progress its current attempt reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from jobkit.run import records
from jobkit.run.accounting import Account, Restart, account, goodput, restart
from jobkit.run.events import Event
from jobkit.run.journal import Entry
from jobkit.run.records import Failure, Progress, Straggler


class State(str, Enum):
    """How a run stands."""

    QUEUED = "queued"
    HELD = "held"
    """In the queue, and Slurm does not start it until somebody releases it; only seen from outside, never recorded."""
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """It can be continued."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __str__ = str.__str__

    @property
    def is_under_way(self) -> bool:
        """Whether a job is there for the run, as far as is known."""
        return self in (State.QUEUED, State.HELD, State.RUNNING)


CAUSES = {
    "finished": "the training function returned",
    "preempted": "a job of higher priority got the nodes",
    "timeout": "the time limit",
    "signal": "a signal from a user or another program",
    "cancelled": "scancel or jobkit cancel",
    "user": "Ctrl-C, or SIGTERM to a local run",
    "crashed": "an exception, or an exit code other than 0",
    "out_of_memory": "the host's or the device's memory was too small",
    "killed": "a rank, or all, died of a signal from outside",
    "hang": "no step in the time that `watchdog` allows",
    "node_failure": "a node died",
    "disk": "the run directory's disk is full, read-only or gone",
    "lost": "the job is gone, and nothing says why",
    "left": "the script ended without ctx.finish",
}
"""Why an attempt ends."""


@dataclass
class Attempt:
    """One start of the run's processes, from the batch script to its end."""

    id: int
    cluster: str
    job_id: str
    started: float
    ended: float | None = None
    cause: str | None = None
    """Why it ended, one of CAUSES; None while it runs."""
    first_step: int | None = None
    """Steps done before this attempt, from the checkpoint it resumed."""
    last_step: int | None = None
    """Steps done when it ended, those that no checkpoint holds included."""
    host: str = ""
    code: str = ""
    submission: int = 0
    """Which submission by a person it belongs to: budgets are counted for each by itself."""
    durable_step: int = 0
    """Step of the newest checkpoint when it ended."""
    evaluated: int = 0
    """Samples that were known of evaluations at one place when a stop broke one off, kept for the next attempt."""
    evaluated_step: int = 0
    evaluated_place: int = 0
    """That place: the step, and 0 for before the loop, 1 in the step, 2 after the loop."""
    failure: Failure | None = None
    """What is known of an end that left no time to save; None where the ranks could say themselves why they ended."""
    slurm_cluster: str | None = None
    """As the Status's, when it was submitted."""
    queued: float | None = None
    """When it was put into the queue, in seconds since the epoch, as all times here."""
    resumed: float | None = None
    """When its loop began: what came before is start-up."""
    from_memory: bool = False
    """Whether from a snapshot in memory, newer than every checkpoint."""
    last_seen: float | None = None
    """When it was last known to have done a step."""
    stalled: float = 0.0
    """Seconds for which checkpoints held up the loop."""
    account: Account | None = None
    """Where its time went."""
    restart: Restart | None = None
    """What it took to go on from the attempt before; None for the first."""
    began: str = "submitted"
    """How it came to be: `submitted`, `requeued`, `resubmitted`, or `in place`, on the nodes of the one before."""
    nodes: list[str] = field(default_factory=list)
    """Slurm's names of the nodes that its ranks are on, in the order of the ranks."""
    wanted_nodes: int = 0
    """How many nodes it would have had; 0 where nobody counts them."""
    noticed: float | None = None
    """When its supervisor knew that its ranks had to be ended."""
    joined: float | None = None
    """When its ranks had formed their group: what comes until `resumed` is the model and the checkpoint."""
    stepped: float | None = None
    """When it had done its first step."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of Python, torch and others that it ran with, and its device's name, since its loop began."""

    @property
    def has_loop(self) -> bool:
        """Whether its loop has begun, as far as it has said."""
        return self.resumed is not None or bool(self.last_step)

    @property
    def ended_hard(self) -> bool:
        """Whether its ranks could not say why it ended."""
        return self.failure is not None


@dataclass
class Status:
    """What `jobkit status --json` prints and status.json holds."""

    state: State = State.QUEUED
    step: int = 0
    """Steps done and not lost, or under way."""
    total_steps: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    result: Any = None
    error: str | None = None
    cluster: str | None = None
    """Where the run was last submitted to."""
    scheduler: str | None = None
    """`slurm` or `local`: who knows the job of that id."""
    job_id: str | None = None
    slurm_cluster: str | None = None
    """Which Slurm knows the job, as jobkit.slurm.cluster() names it; None for another scheduler."""
    probably: str | None = None
    """What a look from outside found and nobody has recorded: its job is gone, for this cause, one of CAUSES. `state`
    is then what a submission would find."""
    waits_for: str | None = None
    """What the queued or held run waits for, as a look from outside found it: Slurm's word for its job, or of a local
    run also its place in the line."""
    checkpoint: int | None = None
    """Step of the newest durable checkpoint."""
    cancel_requested: bool = False
    cancel_grace: float | None = None
    """Seconds from the request that its ranks may take to save; None where nobody has asked."""
    cancel_at: float | None = None
    """When it was requested, in seconds since the epoch."""
    submitting: bool = False
    """A submission began and neither its success nor its failure was recorded."""
    before_submission: tuple[State, str | None] = (State.INTERRUPTED, None)
    """The state and error to fall back to when it failed."""
    code: str = ""
    """The code snapshot of the newest submission."""
    command: str = ""
    """What to type to continue the run: the command of the newest submission."""
    resume: str = ""
    """What to type instead, where something secret is masked in that command."""
    cwd: str = ""
    """Where it was typed."""
    script: str = ""
    """The file of the script that runs it by jobkit.init, where one does."""
    typed: str = ""
    """The words that started that script; under a launcher without the launcher's own."""
    launcher: str = ""
    """Who started it, as worker/launcher.py names it: `python` for nobody else."""
    submissions: int = 0
    """How often a person has submitted it."""
    excluded_nodes: list[str] = field(default_factory=list)
    """Nodes excluded for this submission: they failed under it too often."""
    lost_nodes: dict[str, float] = field(default_factory=dict)
    """Nodes that this start of the job has lost, and when, in seconds since the epoch."""
    stragglers: list[Straggler] = field(default_factory=list)
    """Ranks that hold the others up right now."""
    goodput: float | None = None
    """Useful step time over wall time since the first start; 1 would be: nothing but new steps."""
    queued: float | None = None
    """When the next attempt was put into the queue."""
    next_began: str = "submitted"
    """What `began` of the next attempt will be."""
    checkpoint_seconds: float = 0.0
    """What the newest checkpoint took to be durable."""
    sweep: str = ""
    """The sweep whose submission was the newest, as `digits/s1`."""
    journal_bytes: int = 0
    """The length of the journal that it follows from: where the journal is longer by now, more has happened."""
    start_from: dict[str, Any] | None = None
    """The checkpoint of another run that it starts from: `run`, `step`, `weights_only`; None for one from step 0."""
    name: str | None = None
    """The config's; None where an earlier jobkit submitted the run, which journalled none of these three."""
    params: dict[str, Any] = field(default_factory=dict)
    """The config's, with what is secret in them masked."""
    seed: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    """What was logged last."""
    waiting: str | None = None
    """What the run's own process waits for before the next attempt, as in `1 GPU`; still there where that process was
    killed, or the machine has started anew."""
    priority: int = 0
    """Of a local run, among those of its user that wait: `--priority`."""
    queues: bool = False
    """Whether a local run waits for CPU slots, too: `--queue`."""
    after: list[str] = field(default_factory=list)
    """The runs that it comes after."""
    held_for_others: bool = False
    """Whether its job on Slurm was held because one of those has no job: who continues that one releases it."""
    skip_samples: list[int] = field(default_factory=list)
    """Ids of samples that the loader leaves out since a person has gone back."""
    skipped_batches: dict[str, list[int]] = field(default_factory=dict)
    """Step -> ids of samples, of the batches that were left out, since their loss was no number."""
    loss_without_harm: dict[str, Any] | None = None
    """{step, rank, samples}: the first step of the newest attempt that had one, whose loss was no number and whose
    gradients were finite."""
    given: dict[str, Any] | None = None
    """A `records.GivenValues` of all its submissions; None where an earlier jobkit made them."""

    @property
    def start(self) -> tuple[str | None, int, int]:
        """What tells the start of the job that this speaks of from every later one."""
        return self.job_id, self.submissions, len(self.attempts)

    @property
    def cancel_seconds_left(self) -> float:
        """Of what the ranks of a run that is being cancelled may take to save."""
        seconds = self.cancel_grace or 0.0  # at most, though another host's clock may be off
        return min(seconds, max(0.0, (self.cancel_at or 0.0) + seconds - time.time()))

    @property
    def seconds_to_progress(self) -> float:
        """What an attempt takes to start and to make a checkpoint, as far as the run has seen."""
        starts = [one.resumed - one.started for one in self.attempts if one.resumed is not None]
        return (starts[-1] if starts else 0.0) + self.checkpoint_seconds

    @property
    def never_submitted(self) -> bool:
        """Whether its submission was killed before it could write down that it began."""
        return self.submissions == 0 and not self.attempts

    @property
    def has_begun(self) -> bool:
        """Whether it has had an attempt since a person has submitted it last."""
        return any(attempt.submission == self.submissions for attempt in self.attempts)

    @property
    def waits_in_sweep(self) -> bool:
        """Whether it is for the process that waits for a local sweep's runs to start it, once it may."""
        is_waiting = self.state == State.QUEUED and not self.submitting and not self.has_begun
        return is_waiting and bool(self.sweep) and self.scheduler == "local"

    @property
    def attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def has_loop(self) -> bool:
        """Whether a loop has begun: nobody knows of steps of a command that reports nothing, or of a function without
        one."""
        return self.total_steps is not None or any(attempt.has_loop for attempt in self.attempts)

    @property
    def steps(self) -> str:
        """How far it is, as commands print it: `step 20/100`; empty where there is no loop."""
        return (f"step {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")) if self.has_loop else ""

    @property
    def at_steps(self) -> str:
        """` at step 20/100`, or nothing; of a run that has failed the step that did, and not the one that is kept."""
        failure = self.attempt.failure if self.attempt is not None and self.state == State.FAILED else None
        if not self.has_loop or failure is None or failure.step is None:
            return f" at {self.steps}" if self.has_loop else ""
        return f" at step {failure.step}" + (f"/{self.total_steps}" if self.total_steps else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; of a failure only what is known."""
        plain = asdict(self)
        for attempt, found in zip(plain["attempts"], self.attempts, strict=True):
            attempt["failure"] = found.failure and records.known(found.failure)
        return plain


def derive(events: Sequence[Entry], progress: Progress | None = None) -> Status:
    """The status after `events`; `progress` is the newest report of an attempt."""
    status = Status()
    for event in events:
        apply(status, event)
    return complete(status, progress)


def complete(status: Status, progress: Progress | None = None) -> Status:
    """Add to what follows from the events what follows from the newest report of an attempt, and the account.

    Changes `status`, after which no more events can be applied to it, and returns it.
    """
    attempt = status.attempt
    if progress and attempt:
        status.values = dict(progress.values)  # those of an attempt that has ended are the newest until the next logs
    if progress and attempt and progress.attempt == attempt.id:
        status.total_steps = status.total_steps if progress.total_steps is None else progress.total_steps
        if status.state == State.RUNNING:
            status.step = max(status.step, progress.step or 0)
        elif attempt.last_step is None:
            attempt.last_step = progress.step
        if attempt.ended is None or attempt.ended_hard:
            attempt.last_seen = progress.last_beat
    _account(status)
    return status


def _account(status: Status) -> None:
    """Where the time of each attempt went, and how much of all of it was useful."""
    best = 0
    goes_on = status.state.is_under_way or status.state == State.FINISHED
    before: Attempt | None = None
    for attempt in status.attempts:
        if before is not None:
            attempt.restart = restart(
                last_seen=before.last_seen,
                noticed=before.noticed,
                ended=before.ended,
                queue=max(0.0, attempt.started - attempt.queued) if attempt.queued is not None else 0.0,
                joined=attempt.joined,
                resumed=attempt.resumed,
                stepped=attempt.stepped,
            )
        before = attempt
        first_step = attempt.first_step or 0
        last = attempt.last_step if attempt.ended or attempt.last_step else status.step
        last_step = max(last or 0, first_step)
        attempt.account = account(
            queued=attempt.queued,
            started=attempt.started,
            resumed=attempt.resumed,
            last_seen=attempt.last_seen,
            ended=attempt.ended,
            steps=range(first_step, last_step),
            stalled=attempt.stalled,
            best_before=best,
            kept=None if goes_on else status.checkpoint or 0,
        )
        best = max(best, last_step)
    if any(attempt.resumed for attempt in status.attempts):  # of a command that reports nothing, nothing is known
        accounts = [one.account for one in status.attempts if one.account]
        status.goodput = goodput(accounts, status.attempts[0].started)


def apply(status: Status, event: Entry) -> None:
    """Let one more event of the journal change `status`: one that lacks something only by what it has before that."""
    # One of a journal that was written to by hand, or of another program, must not keep others from their list.
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        _apply(status, event)


def _apply(status: Status, event: Entry) -> None:
    attempt = status.attempt
    if event["event"] != Event.STARTED and attempt and event.get("attempt") not in (None, attempt.id):
        return  # what an older attempt writes late says nothing about the one that runs now
    match event["event"]:
        case Event.SUBMITTING:
            _submitting(status, event)
        case Event.SUBMITTED:
            if status.submitting:  # else an attempt has begun since: whichever job that is runs it
                status.job_id = event.get("job_id")  # not the state: that job may have ended before this was written
            status.submitting = False
        case Event.SUBMIT_FAILED:
            status.submitting = False
            status.state, status.error = status.before_submission
        case Event.WAITING:
            status.waiting, status.held_for_others = str(event.get("for")), bool(event.get("held"))
        case Event.STARTED:
            _started(status, event)
        case Event.RESUMED:
            _resumed(status, event)
        case Event.CHECKPOINT:
            status.step = status.checkpoint = int(event["step"])
            status.checkpoint_seconds = float(event.get("seconds", 0.0))
            if attempt:
                attempt.durable_step = status.checkpoint
                attempt.stalled += float(event.get("stall", 0.0))
        case Event.EVALUATION_INTERRUPTED:
            if attempt and event["kept"]:
                attempt.evaluated_step, attempt.evaluated_place = int(event["step"]), int(event.get("place", 0))
                attempt.evaluated = int(event.get("known", 0))
        case Event.REWOUND:
            status.state, status.error, status.result = State.INTERRUPTED, None, None
            status.step = status.checkpoint = int(event["step"])
            status.skip_samples = event.get("skip_samples", status.skip_samples)
            _forget_skipped(status, status.step)
        case Event.BATCH_SKIPPED:
            status.skipped_batches[str(event["step"])] = list(event["samples"])
        case Event.LOSS_WITHOUT_HARM:
            status.loss_without_harm = {key: event[key] for key in ("step", "rank", "samples")}
        case Event.CHECKPOINTS_REMOVED:
            _checkpoints_removed(status)
        case Event.STRAGGLER:
            status.stragglers.append(records.of(Straggler, event))
        case Event.STRAGGLER_OVER:
            status.stragglers = [one for one in status.stragglers if one.rank != event.get("rank")]
        case Event.INTERRUPTED:
            cause = str(event.get("cause"))
            _end(status, event, State.CANCELLED if cause == "cancelled" else State.INTERRUPTED, cause)
            status.waiting = None  # it has left the line
        case Event.PLACED:
            if attempt:
                attempt.nodes, attempt.wanted_nodes = list(event["nodes"]), int(event["wanted"])
        case Event.NODE_LOST:
            status.lost_nodes[str(event["node"])] = float(event["time"])
        case Event.STEPPED:
            if attempt:
                attempt.stepped = float(event["time"])
        case Event.RESTARTED:
            status.state, status.queued, status.next_began = State.RUNNING, None, "in place"
        case Event.REQUEUED:
            status.state, status.queued = State.QUEUED, float(event["time"])
            status.lost_nodes = {}
            status.next_began = "resubmitted" if event.get("predecessor") else "requeued"
            status.job_id = event.get("job_id", status.job_id)
        case Event.REQUEUE_FAILED:
            status.state, status.error = State.INTERRUPTED, event.get("error")
        case Event.EXCLUDED:
            status.excluded_nodes = sorted({*status.excluded_nodes, str(event["node"])})
        case Event.CANCEL_REQUESTED:
            status.cancel_requested, status.cancel_at = True, float(event["time"])
            status.cancel_grace = event.get("grace")
        case Event.CANCELLED:
            if status.state == State.RUNNING and attempt and attempt.ended is None:
                attempt.ended, attempt.cause = float(event["time"]), "cancelled"
            status.state, status.stragglers, status.waiting = State.CANCELLED, [], None
            status.error = event.get("error", status.error)
        case Event.FINISHED:
            _end(status, event, State.FINISHED, "finished")
            status.result = event.get("result")
        case Event.FAILED:
            _end(status, event, State.FAILED, str(event.get("cause", "crashed")))
            status.error = event.get("error")


def _submitting(status: Status, event: Entry) -> None:
    if status.attempts or status.state != State.QUEUED:
        status.before_submission = (status.state, status.error)
    status.submitting = True
    status.state, status.error, status.cancel_requested = State.QUEUED, None, False
    status.next_began = "submitted"
    status.submissions, status.excluded_nodes, status.lost_nodes = status.submissions + 1, [], {}
    status.queued = float(event["time"])
    status.cluster, status.scheduler, status.job_id = event.get("cluster"), event.get("scheduler"), None
    status.slurm_cluster = event.get("slurm_cluster")
    status.cancel_at = status.cancel_grace = None
    status.code = str(event.get("code", ""))
    status.command, status.cwd = str(event.get("command", "")), str(event.get("cwd", ""))
    status.resume = str(event.get("resume", ""))
    status.script, status.typed = str(event.get("script", "")), str(event.get("typed", ""))
    status.launcher = str(event.get("launcher", ""))
    status.sweep = str(event.get("sweep", ""))
    status.start_from = event.get("start_from")
    status.name, status.seed = event.get("name"), event.get("seed")
    status.given = _with_given(status.given, event.get("given"))
    status.params = dict(event.get("params") or {})
    status.after, status.held_for_others = list(event.get("after") or []), bool(event.get("held_for_others"))
    status.waiting, status.priority, status.queues = None, int(event.get("priority", 0)), bool(event.get("queues"))


def _with_given(before: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any] | None:
    """What two submissions have given: a key that decides what a run computes has one value in all of them."""
    if before is None or now is None:
        return now if before is None else before
    inherited = [*before["inherited"], *now["inherited"]]
    return {"values": before["values"] | now["values"], "inherited": list(dict.fromkeys(inherited))}


def _started(status: Status, event: Entry) -> None:
    status.submitting, status.waiting = False, None
    status.stragglers = []
    status.state, status.job_id = State.RUNNING, event.get("job_id")
    before = status.attempt if status.next_began == "in place" else None
    status.attempts.append(
        Attempt(
            id=int(event["attempt"]),
            cluster=str(status.cluster),
            job_id=str(event.get("job_id")),
            started=float(event["time"]),
            host=str(event.get("host", "")),
            code=status.code,
            slurm_cluster=status.slurm_cluster,
            submission=status.submissions,
            durable_step=status.checkpoint or 0,
            queued=status.queued,
            began=status.next_began,
            nodes=before.nodes if before else [],
            wanted_nodes=before.wanted_nodes if before else 0,
        )
    )


def _forget_skipped(status: Status, step: int) -> None:
    """The steps from `step` on are repeated."""
    status.skipped_batches = {key: ids for key, ids in status.skipped_batches.items() if int(key) < step}


def _resumed(status: Status, event: Entry) -> None:
    status.step = int(event["step"])
    _forget_skipped(status, status.step)
    status.total_steps = event.get("total_steps", status.total_steps)
    status.checkpoint = status.step if event.get("checkpoint") else event.get("durable_step")
    if attempt := status.attempt:
        attempt.first_step = status.step
        attempt.durable_step = status.step if not event.get("memory") else status.checkpoint or 0
        attempt.from_memory = bool(event.get("memory"))
        attempt.resumed = float(event["time"])
        attempt.joined = event.get("joined")
        attempt.versions = dict(event.get("versions", {}))


def _checkpoints_removed(status: Status) -> None:
    status.checkpoint = None
    if status.state != State.FINISHED:
        status.step = 0  # all that was done is to be done again
        _forget_skipped(status, 0)
    for attempt in status.attempts:
        attempt.durable_step = 0


def _end(status: Status, event: Entry, state: State, cause: str) -> None:
    attempt = status.attempt
    if attempt and attempt.ended is not None and status.state == State.QUEUED and event.get("attempt") == attempt.id:
        attempt.failure = None  # it was decided about while its ranks were still saving: they know better
        attempt.last_step = event.get("step", attempt.last_step)
        return
    status.state = state
    status.stragglers = []
    if attempt and attempt.ended is None:
        attempt.ended, attempt.cause = float(event["time"]), cause
        attempt.failure = None if event.get("failure") is None else records.of(Failure, event["failure"])
        if event.get("step") is not None:
            attempt.last_step = status.step = int(event["step"])
        if event.get("reached") is not None:
            attempt.last_step = int(event["reached"])
        attempt.last_seen = event.get("last_seen")
        attempt.noticed = event.get("noticed")
