"""Why an attempt ended whose ranks could not say so: from what they, srun, Slurm and stop requests left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE, SchedulerError
from jobkit.run.records import Failure, FailureReport
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt


@dataclass(frozen=True)
class FirstFailure:
    """The first rank that ended as it should not, as whoever started it saw it."""

    rank: int | None = None
    node: str | None = None
    signal: int | None = None
    """The signal it died of; None where it exited by itself."""
    code: int | None = None
    out_of_memory: bool = False
    """Whether the kernel or Slurm says that it was ended for the memory it used."""
    node_lost: bool = False
    error: str | None = None
    """What srun said of a node that it could not start anything on."""


@dataclass(frozen=True)
class Notice:
    """By which signal Slurm has told the ranks to stop."""

    signal: int
    seconds: float
    """How long before they ended."""


@dataclass(frozen=True)
class EndCause:
    """The cause of an attempt's end, and what is known of it: see Attempt.failure."""

    cause: str
    failure: Failure = field(default_factory=Failure)


def diagnose(
    run: RunDir,
    attempt: int,
    nodes: int,
    first: FirstFailure | None,
    job: slurm.JobInfo | None,
    *,
    is_silent: bool = False,
) -> EndCause:
    """The cause of the hard end of an attempt on some nodes, the most reliable source first.

    `is_silent` is whether its ranks are a command's that does not use jobkit: its exit codes mean what it wants.
    """
    if first is not None and first.node_lost:  # whatever else happened followed from it
        return node_died(first.node, first.error)
    progress = run.progress()
    known = Failure(peak_bytes=progress.peak_bytes) if progress and progress.attempt == attempt else Failure()
    request = run.stop_request(attempt)
    if request is not None and request.cause == "hang" and (own := own_failure(run, attempt)) is not None:
        return own  # it had failed, and did not end
    if request is not None:  # our own doing: the signals that Slurm and the ranks report follow from it
        return EndCause(request.cause, replace(known, error=request.error))
    # Slurm ended the job: the ranks died of its signals.
    if job is not None and (cause := slurm.stop_cause(job)):
        return EndCause(cause, replace(known, error="the batch script was killed" if cause == "killed" else None))
    if first is not None and first.signal is not None:  # before reports: the others' are of a closed connection
        return _killed(first, known)
    reports = run.failure_reports(attempt)
    report = _first_of(reports)
    # Nobody asked it to stop, so it could not go on; and it would have reported why, had the disk taken it.
    if report is None and first is not None and first.code == EXIT_RESUMABLE and not is_silent:
        return EndCause("disk", replace(known, error=f"rank {first.rank} could not write to the run directory's disk"))
    # The first to end has said nothing, and what the others say is only that it is gone.
    silent = first is not None and first.rank not in [one.rank for one in reports]
    if report is None or (silent and _is_secondary(report)):
        return _silent(run, attempt, first or FirstFailure(), known)
    return _reported(report, reports, nodes, known)


def node_died(node: str | None, error: str | None = None) -> EndCause:
    """The cause where a node was lost, or nothing could be started on it: `error` says what srun said then."""
    return EndCause("node_failure", Failure(node=node, error=error or f"node {node} died"))


def own_failure(run: RunDir, attempt: int) -> EndCause | None:
    """What a rank reported of a failure of its own; None where no rank did, or all only missed another one."""
    reports = run.failure_reports(attempt)
    report = _first_of(reports)
    return None if report is None or _is_secondary(report) else _reported(report, reports, 1, Failure())


SAID_LINES, SAID_CHARACTERS = 4, 4096
"""How much is told of the end of a rank's stderr, at most."""

LOOKED_AT_BYTES = 1 << 16
"""How far from its end that is looked at: the options of a program that refuses one of them may take many lines."""


USAGE = 2
"""The exit code with which argparse, and click, end a program whose options are wrong."""

_UNKNOWN = "|".join(
    (
        *("unrecognized arguments: ", "the following arguments are required: ", "ambiguous option: "),
        "one of the arguments .* is required",
        r"argument \S+: (not allowed with argument|invalid (int|float|complex) value: )",
        *("No such (option|command)", "Missing (option|argument|parameter|command)", "Got unexpected extra argument"),
        "Invalid value for .*: .* is not a valid (integer|float|boolean|UUID)",
    )
)
_REFUSAL = re.compile(rf"(\S.*: )?error: ({_UNKNOWN})", re.IGNORECASE)
"""The line that they print last, of words alone: a program may say in the same form what it lacks, as a folder that is
away. Theirs comes after `usage:`, maybe of hundreds of options; other programs end with that code, too."""


def _last_said(run: RunDir, attempt: int, rank: int | None) -> list[str]:
    """The last lines that a rank printed to stderr, without empty ones."""
    if rank is None:
        return []
    try:
        with run.rank_log(attempt, rank, "err").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOOKED_AT_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]


def _silent(run: RunDir, attempt: int, first: FirstFailure, known: Failure) -> EndCause:
    code = "" if first.code is None else f" with exit code {first.code}"
    who = "the ranks" if first.rank is None else f"rank {first.rank}"
    lines = _last_said(run, attempt, first.rank)
    said = " / ".join(lines[-SAID_LINES:])[-SAID_CHARACTERS:]
    error = f"{who} ended{code}{f': {said}' if said else '; what it printed is in its log'}"
    # Its words are those of the YAML; but where they were right before, it is another program here, or a shell's words.
    is_usage = first.code == USAGE and any(line.lower().startswith("usage: ") for line in lines)
    final = True if is_usage and _REFUSAL.match(lines[-1]) and not _has_earlier(run, attempt) else None
    return EndCause("crashed", replace(known, rank=first.rank, node=first.node, error=error, final=final))


def _has_earlier(run: RunDir, attempt: int) -> bool:
    """Whether there was an attempt before this one since a person has submitted the run last."""
    attempts = run.status().attempts
    submission = next((one.submission for one in attempts if one.id == attempt), None)
    return any(one.id < attempt and one.submission == submission for one in attempts)


def _killed(first: FirstFailure, known: Failure) -> EndCause:
    who = "a rank" if first.rank is None else f"rank {first.rank}"
    where = f" on {first.node}" if first.node else ""
    peak = f"peak of a rank: {known.peak_bytes / 2**30:.2f} GiB" if known.peak_bytes else ""
    known = replace(known, rank=first.rank, node=first.node)
    if first.out_of_memory:
        error = f"{who}{where} was killed for lack of memory on the host{f'; {peak}' if peak else ''}"
        return EndCause("out_of_memory", replace(known, error=error))
    how = "SIGKILL" if first.signal == signal.SIGKILL else f"signal {first.signal}"
    hint = f" (out of memory?{f' {peak}' if peak else ''})" if first.signal == signal.SIGKILL else ""
    return EndCause("killed", replace(known, error=f"{who}{where} was killed by {how}{hint}"))


def _reported(report: FailureReport, reports: Sequence[FailureReport], nodes: int, known: Failure) -> EndCause:
    failure = Failure(
        error=f"rank {report.rank}: {report.error}",
        rank=report.rank,
        step=report.step,
        samples=report.samples,
        traceback=report.traceback,
        node=report.node,
        peak_bytes=report.peak_bytes or known.peak_bytes,
        not_finite=report.not_finite,
        faulty_node=report.faulty_node,
    )
    if report.disk:
        return EndCause("disk", failure)
    if report.out_of_memory:
        peak = f" (peak of the {report.out_of_memory}'s memory: {(report.peak_bytes or 0) / 2**30:.2f} GiB)"
        return EndCause("out_of_memory", replace(failure, error=f"{failure.error}{peak}"))
    if report.final:
        return EndCause("crashed", replace(failure, final=True))
    same = {one.node_index for one in reports if one.error == report.error}
    return EndCause("crashed", replace(failure, everywhere=len(same) >= nodes and not report.alone))


# Reports of ranks


# What ranks say when another one is gone (gloo, NCCL, TCPStore): true, but not the cause. Not by time alone, since the
# clocks of nodes differ, nor by who ended first: the one that failed may take longer to end than the others.
_SECONDARY = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Connection was likely closed|Failed to (recv|send)|"
    r"Timed out waiting \d+ms|recvValue|Application timeout|NCCL|remote process|has lost the connection to another rank"
)


def has_reported(run: RunDir, attempt: int, rank: int | None) -> bool:
    """Whether a rank has written down an error of its own, and does not only miss another rank."""
    return any(one.rank == rank and not _is_secondary(one) for one in run.failure_reports(attempt))


def _is_secondary(report: FailureReport) -> bool:
    return _SECONDARY.search(report.error) is not None


def _first_of(reports: Sequence[FailureReport]) -> FailureReport | None:
    """The earliest that is not about the others' end, else the earliest; what would fail again comes before all."""
    final = [report for report in reports if report.final]
    own = [report for report in reports if not _is_secondary(report)]
    return next(iter(final or own or reports), None)


# What srun and Slurm say

# srun's messages: `srun: error: node2: task 3: Killed`, and `tasks 0-1,3: Exited with exit code 1` for several.
_TASK = re.compile(r"srun: error: (\S+?): tasks? (\d+)[\d,-]*: (.*)")
_NODE = re.compile(r"srun: error: (?:Node failure on|Task launch for \S+ failed on node) ([^\s:]+)")
_NO_STEP = re.compile(r"srun: error: Unable to (?:create step|confirm allocation) for job \S+: (.*)")
# Of these the job's own options are the reason, and not a node, unless one is down: then srun says the second, too.
_WRONG_REQUEST = re.compile(r"[Mm]emory|configuration is not available|[Ii]nvalid|[Mm]ore \w+ requested|[Tt]ask count")
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()} | {"Out Of Memory": 9}


def first_failure(text: str) -> FirstFailure | None:
    """Which rank or node failed first, by what srun printed; None where it says nothing of the kind."""
    oom = "oom_kill event" in text or "Out Of Memory" in text
    if lost := _NODE.search(text):  # the others' deaths come first there: srun waits until slurmctld tells it
        return FirstFailure(node=lost[1], node_lost=True)
    for line in text.splitlines():
        if match := _TASK.search(line):
            return _task_end(match, oom)
    return FirstFailure(signal=9, out_of_memory=True) if oom else None


def failed_launch(text: str, down: Callable[[], Sequence[str]]) -> FirstFailure | None:
    """The node that an srun which has ended could start nothing on, by what it printed, or whichever of its nodes is
    `down`; None where the job's options, or nothing that is known, kept it from starting."""
    text = _STARTS.split(text)[-1]
    words = last_words(text)
    if lost := _NODE.search(text):
        return FirstFailure(node=lost[1], node_lost=True, error=words)
    if (no_step := _NO_STEP.search(text)) is None:
        return None
    node = next(iter(down()), None)
    if node is None and _WRONG_REQUEST.search(no_step[1]):
        return None
    return FirstFailure(node=node, node_lost=True, error=words)


def last_words(text: str) -> str:
    """The last lines that the newest srun printed, in one."""
    return " / ".join(_STARTS.split(text)[-1].strip().splitlines()[-3:])


def end_on_node(text: str, node: str) -> FirstFailure | None:
    """How the newest task on a node ended, by what srun printed; None where it says nothing of it."""
    found = [match for match in map(_TASK.search, text.splitlines()) if match and node in _names(match[1])]
    return None if not found else replace(_task_end(found[-1]), rank=None, node=node)


def _names(nodes: str) -> list[str]:
    return slurm.expand(nodes) if "[" in nodes else nodes.split(",")


def _task_end(match: re.Match[str], oom: bool = False) -> FirstFailure:
    how = match[3].removesuffix(" (core dumped)").strip()
    code = re.fullmatch(r"Exited with exit code (\d+)", how)
    return FirstFailure(
        rank=int(match[2]),
        node=match[1],
        signal=_SIGNALS.get(how),
        code=int(code[1]) if code else None,
        out_of_memory=oom,
    )


# Before what an srun prints: which nodes it is to start parents on. An attempt in place goes on with those of others.
_STARTS = re.compile(r"^jobkit: srun starts on (\S+)$", re.MULTILINE)


def srun_starts(nodes: Sequence[str]) -> str:
    """The line before what an srun prints."""
    return f"jobkit: srun starts on {','.join(nodes)}\n"


def srun_said(run: RunDir, number: int) -> str:
    """What the sruns that an attempt has started have printed so far."""
    try:
        return run.srun_log(number).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def srun_said_about(run: RunDir, attempts: Sequence[Attempt], number: int) -> str:
    """What srun has printed about the nodes of an attempt so far: also one that an attempt before it on the same nodes
    has started, as far as it was not about an end that came before this attempt."""
    until = next(index for index, one in enumerate(attempts) if one.id == number)
    since = next((index for index in range(until, 0, -1) if attempts[index].began != "in place"), 0)
    own = attempts[until].nodes
    found: list[tuple[str, Sequence[str]]] = []
    for one in attempts[since : until + 1]:
        for line in srun_said(run, one.id).splitlines():
            if starts := _STARTS.match(line):
                again = starts[1].split(",")
                found = [(text, nodes) for text, nodes in found if not set(nodes).intersection(again)]
            else:
                nodes = _named_in(line)
                if set(nodes).intersection(own) if nodes and own else one.id == number:
                    found.append((line, nodes))
    return "\n".join(text for text, _ in found)


def _named_in(line: str) -> Sequence[str]:
    """The nodes that a message of srun's is about; none where it names none."""
    named = _NODE.search(line) or _TASK.search(line)
    with contextlib.suppress(SchedulerError):
        return _names(named[1]) if named else []
    return []


def first_failure_of_job(said: str, job: slurm.JobInfo | None, nodes: Sequence[str] = ()) -> FirstFailure | None:
    """The node that Slurm says is down or no longer answers, of those that the attempt was on, where they are known,
    else of the job; else what `first_failure` finds."""
    with contextlib.suppress(SchedulerError):  # a Slurm that is away is asked again by the next attempt
        looked_at = ",".join(nodes) or (job.nodes if job is not None else "")
        if looked_at and (node := slurm.dead_node(looked_at)):
            return FirstFailure(node=node, node_lost=True)
    return first_failure(said)
