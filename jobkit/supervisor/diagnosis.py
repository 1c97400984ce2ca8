"""Why an attempt ended: a pure function of what the supervisor saw and of what the ranks left.

    Facts (exits, lost nodes, Slurm's word) + Traces (ends/<attempt>/*.json) --diagnose()--> Verdict --> AttemptEnded

closing.py calls it; loop.py asks for Slurm's word. Facts count in the order of their arrival, because the clocks of
nodes differ. Messages of libraries are not read: an error after another rank's death or RankReport (its record of how
it ended) is a consequence.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import EXIT_RESUMABLE, Nature
from jobkit.run.records import AttemptBegan, Cause, RankReport
from jobkit.wire.messages import RankExited, Silent

if TYPE_CHECKING:
    from jobkit.slurm.jobs import StopCause

NOT_FOUND = (126, 127)
"""Exit codes of a shell whose command cannot be executed, or is not there."""

BY_NODE = frozenset([signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGKILL])
"""Signals that speak against a node whose rank dies first of them. SIGABRT does not: a watchdog of collectives sends it
to all ranks."""

SAID_CHARACTERS = 2000
"""How much of the end of a rank's stderr stands in the journal, at most."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_STOPPED = "the ranks were told to stop, and nobody knows by whom"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
OF_A_STOP = frozenset([*(-number for number in _STOP_SIGNALS), *(128 + number for number in _STOP_SIGNALS)])
"""Exit codes of a program that a stop signal ended; a shell adds 128."""


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node that is gone, or that nothing could be started on."""

    node: str
    why: str
    at: int = 0
    """How many exits had arrived when its connection was *closed* (not when the supervisor gave the node up): it beats
    exits that follow, which are its consequences."""


@dataclass(frozen=True, kw_only=True)
class FailedSetup:
    """A line of the cluster's `setup:` failed in this start of the job, and no agent was started."""

    node: str | None
    """Slurm's name of the node with the batch script; None on this machine."""
    words: str
    """The line, its exit code, and its last line of output."""


@dataclass(kw_only=True)
class Facts:
    """The facts that the supervisor saw of the end of an attempt; running.py and loop.py fill it in."""

    exits: list[tuple[RankExited, str]] = field(default_factory=list)
    """Ranks that ended, in order of arrival, each with the name of its node."""
    reported: frozenset[int] | None = None
    """Ranks whose RankReport lay there when the first exit with a failure arrived: one that came later is a
    consequence. None if nobody looked: then all of them count, unless a signal killed that rank."""
    lost_nodes: list[LostNode] = field(default_factory=list)
    """In order of arrival. After a signal of Slurm's a lost agent is no lost node."""
    failed_setup: FailedSetup | None = None
    launch_error: str | None = None
    """Srun's words where it could start nothing and named no node; a node that it named is a LostNode."""
    launch_is_final: bool = False
    """True where another start would end the same way: an option of srun that Slurm refuses, an image without torch."""
    stop_reason: tuple[Cause, str] | None = None
    """The reason for which the supervisor itself ended the ranks (timeout, hang, cancelled, preempted, stopped), and
    words for `error`. The first one counts."""
    silent: tuple[Silent, str] | None = None
    """The first rank that gave no sign of life, and its node: a hang may be the node's."""
    signalled: bool = False
    """True if an agent was sent a signal (by Slurm, or by a person) that it passed on to its ranks."""
    slurm_cause: StopCause | None = None
    """Slurm's word (`slurm.jobs.stop_cause`); None if Slurm gives no reason or no answer, and on this machine."""

    @property
    def snapshot_step(self) -> int | None:
        """See records.AttemptEnded."""
        steps = [exited.snapshot_step for exited, _ in self.exits if exited.snapshot_step is not None]
        return min(steps, default=None) if len(steps) == len(self.exits) else None


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The files that the ranks of an attempt left on the disk."""

    ends: Sequence[RankReport] = ()
    peak_bytes: int | None = None
    """The most host memory that a rank had, by the newest progress report."""
    disk_is_full: Callable[[], bool] = lambda: False
    """Whether the run directory takes no more bytes, now that the attempt has ended."""
    said: Callable[[int], str] = lambda rank: ""
    """The last lines that a rank printed to stderr: shown, never interpreted."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The cause of an attempt's end, and its details: fields of `AttemptEnded`."""

    cause: Cause
    error: str | None = None
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    traceback: str | None = None
    samples: list[int] | None = None
    everywhere: bool = False
    alone: bool = False
    final: bool = False
    nature: Nature | None = None
    signature: str | None = None
    evidence: str | None = None


def diagnose(facts: Facts, traces: Traces, began: AttemptBegan, *, command: bool = False) -> Verdict:
    """Return why an attempt ended. `command` is True for a YAML's `command:`, which may leave no RankReports."""
    if _is_finished(facts, traces.ends, began.ranks, command):
        return Verdict(cause="finished")
    if facts.slurm_cause == "cancelled":  # before all else: a job that its owner has cancelled must not come back
        return Verdict(cause="cancelled")
    failed = {end.rank: end for end in traces.ends if end.kind == "failed"}
    cause, words = facts.stop_reason or (None, "")
    if cause is not None and not (
        cause == "killed" and facts.slurm_cause
    ):  # what Slurm and the ranks say follows from it
        cause_of_hang = _first(failed.values(), failed, facts) if cause == "hang" else None
        if cause_of_hang is None and cause == "hang" and facts.silent is not None:
            hung, node = facts.silent
            return Verdict(
                cause=cause, error=words, rank=hung.rank, node=node, step=hung.step, signature="hang", alone=True
            )
        if cause_of_hang is None:
            return Verdict(cause=cause, error=words or None)
        return _failed(cause_of_hang, failed, began, traces)  # it had failed, and did not end
    deaths = [number for number, (exited, _) in enumerate(facts.exits) if is_failure(exited, traces.ends)]
    if facts.lost_nodes and (not deaths or facts.lost_nodes[0].at <= deaths[0]):
        lost = facts.lost_nodes[0]
        error = f"node {lost.node}: {lost.why}"
        return Verdict(cause="node_failure", node=lost.node, error=error, evidence=lost.why)
    if facts.slurm_cause is not None:  # the ranks died of Slurm's signals
        return Verdict(
            cause=facts.slurm_cause, error="the batch script was killed" if facts.slurm_cause == "killed" else None
        )
    if facts.failed_setup is not None:  # after Slurm's word: its signals reach the line too
        return Verdict(cause="setup", node=facts.failed_setup.node, error=facts.failed_setup.words)
    if deaths:
        verdict = _death(*facts.exits[deaths[0]], facts=facts, failed=failed, began=began, traces=traces)
        is_final = verdict.final or (command and facts.exits[deaths[0]][0].code in NOT_FOUND)
        return replace(_with_devices(verdict, facts), final=is_final)
    if facts.launch_error:
        is_final = facts.launch_is_final
        return Verdict(cause="crashed" if is_final else "node_failure", error=facts.launch_error, final=is_final)
    if end := _first(failed.values(), failed, facts):
        return _failed(end, failed, began, traces)
    stopped = [exited.rank for exited, _ in facts.exits if exited.code == EXIT_RESUMABLE]
    silent = set(stopped).difference(end.rank for end in traces.ends)
    if silent and not command and not facts.signalled:  # worker/ending.py: its RankReport did not fit on the disk
        rank = min(silent)
        return Verdict(cause="disk", error=f"rank {rank} could not write to the run directory's disk", rank=rank)
    if stopped or facts.signalled or any(end.kind == "stopped" for end in traces.ends):
        return Verdict(cause="unknown", error=_STOPPED)
    return Verdict(cause="unknown", error="nobody saw how it ended")


def is_failure(exited: RankExited, ends: Iterable[RankReport]) -> bool:
    """Return whether a rank's exit is a failure: by its RankReport, if it left one, else by its exit code."""
    kind = next((end.kind for end in ends if end.rank == exited.rank), None)
    return kind == "failed" or (kind is None and not exited.is_done and exited.code != EXIT_RESUMABLE)


def _is_finished(facts: Facts, ends: Sequence[RankReport], ranks: int, command: bool) -> bool:
    """Return whether all ranks have finished, by their RankReports or by their exit codes.

    A program under `command:` that was told to stop may have saved, and ended with 0.
    """
    done = {end.rank for end in ends if end.kind == "finished"}
    if not command or not (facts.stop_reason or facts.slurm_cause or facts.signalled):
        done |= {exited.rank for exited, _ in facts.exits if exited.is_done}
        done -= {end.rank for end in ends if end.kind == "failed"}  # a script that ended before ctx.finish
    return ranks > 0 and done.issuperset(range(ranks))


def _death(
    exited: RankExited,
    node: str,
    *,
    facts: Facts,
    failed: Mapping[int, RankReport],
    began: AttemptBegan,
    traces: Traces,
) -> Verdict:
    """Return the verdict about the first rank that failed: by a RankReport that lay there already, else by its exit."""
    if exited.code == -signal.SIGKILL and exited.rank not in failed:  # no consequence of another rank's error
        return _killed(exited, node, facts, traces)
    reported: Collection[int] = facts.reported or ()
    if facts.reported is None and exited.code > 0:
        reported = failed
    lay_there = [failed[rank] for rank in {*reported, exited.rank} if rank in failed]
    if end := _first(lay_there, failed, facts):
        return _failed(end, failed, began, traces)
    if facts.signalled and exited.code in OF_A_STOP:
        return Verdict(cause="unknown", error=_STOPPED)
    if exited.code < 0:
        return _killed(exited, node, facts, traces)
    words = traces.said(exited.rank)
    where = " in the middle of a step" if exited.code == 0 else ""
    return Verdict(
        cause="disk" if traces.disk_is_full() else "crashed",
        error=f"rank {exited.rank} ended with exit code {exited.code}{where}{f': {words}' if words else ''}",
        signature=f"exit code {exited.code} of rank {exited.rank}",
        **_place(exited, node, facts),
    )


def _with_devices(verdict: Verdict, facts: Facts) -> Verdict:
    """Add the word of the devices. A sick one is the cause, wherever a rank failed first."""
    for exited, node in facts.exits:
        if exited.device_is_sick:
            error = f"{verdict.error}; {exited.device}"
            return replace(verdict, node=node, error=error, nature="hardware", evidence=exited.device)
    ours = [exited for exited, node in facts.exits if node == verdict.node]
    words = [exited.device_memory if verdict.cause == "out_of_memory" else exited.device for exited in ours]
    return replace(verdict, error="; ".join(filter(None, [verdict.error, *words])))


def _place(exited: RankExited, node: str, facts: Facts) -> dict[str, Any]:
    """Return where a rank died that left no RankReport, and whether ranks of its node alone died so."""
    elsewhere = [other for other, where in facts.exits if where != node and other.code == exited.code]
    return {
        "rank": exited.rank,
        "node": node,
        "step": exited.step if exited.step >= 0 else None,
        "alone": exited.code == -signal.SIGKILL or not elsewhere,  # we kill the other ranks ourselves
    }


def _first(ends: Iterable[RankReport], failed: Mapping[int, RankReport], facts: Facts) -> RankReport | None:
    """Return the RankReport that is the cause of the others, one that is final rather than another."""
    pool = {end.rank: end for end in ends}
    pool |= {rank: failed[rank] for end in list(pool.values()) for rank in end.seen if rank in failed}
    order = {exited.rank: number for number, (exited, _) in enumerate(facts.exits)}

    def rank_of_cause(end: RankReport) -> tuple[bool, bool, int, float]:
        is_secondary = any(rank in failed for rank in end.seen)
        return not end.final, is_secondary, order.get(end.rank, len(order)), end.time

    return min(pool.values(), key=rank_of_cause, default=None)


def _killed(exited: RankExited, node: str, facts: Facts, traces: Traces) -> Verdict:
    where, number = f"rank {exited.rank} on {node}", signal.Signals(-exited.code)
    place = _place(exited, node, facts)
    signature = f"{number.name} of rank {exited.rank}" if number != signal.SIGABRT else None
    peak = f"peak of a rank: {_gib(traces.peak_bytes)}" if traces.peak_bytes else ""
    if exited.out_of_memory:
        error = f"{where} was killed for lack of memory on the host{f'; {peak}' if peak else ''}"
        return Verdict(cause="out_of_memory", error=error, nature="program", signature=signature, **place)
    hint = f" (out of memory?{f' {peak}' if peak else ''})" if number == signal.SIGKILL else ""
    evidence = f"rank {exited.rank} died of {number.name}" if number in BY_NODE and place["alone"] else None
    error = f"{where} was killed by {number.name}{hint}"
    return Verdict(cause="killed", error=error, signature=signature, evidence=evidence, **place)


def _failed(end: RankReport, failed: Mapping[int, RankReport], began: AttemptBegan, traces: Traces) -> Verdict:
    """Return the verdict of the RankReport of the first rank that failed."""
    cause: Cause = "disk" if end.disk else "out_of_memory" if end.out_of_memory else "crashed"
    peak = end.peak_bytes or traces.peak_bytes
    memory = f" (peak of the {end.out_of_memory}'s memory: {_gib(peak)})" if end.out_of_memory and peak else ""
    returned = [other.rank for other in traces.ends if other.kind == "finished" and other.time < end.time]
    before = f"; rank {min(returned)} had returned before" if returned else ""  # as with fewer batches than the others
    alike = [other for other in failed.values() if other.signature == end.signature and _is_own(other, end)]
    nodes = {other.node for other in alike}
    return Verdict(
        cause=cause,
        error=f"rank {end.rank}: {end.error}{memory}{before}",
        rank=end.rank,
        node=end.node,
        step=end.step,
        traceback=end.traceback,
        samples=end.samples,
        everywhere=len(alike) >= began.ranks or nodes.issuperset(began.nodes),
        alone=len(nodes) == 1,
        final=end.final and cause == "crashed",
        nature="program" if cause == "out_of_memory" else end.nature,
        signature=end.signature,
        evidence="its device failed" if end.nature == "hardware" else None,
    )


def _is_own(other: RankReport, end: RankReport) -> bool:
    """Return whether an error is a rank's own, and not the connection that `end` has closed, in the same line."""
    return other.error == end.error or end.rank not in other.seen


def _gib(size: int | None) -> str:
    return f"{(size or 0) / 2**30:.2f} GiB"


def last_words(log: Path, begin: int = 0, end: int | None = None, lines: int = 1) -> str:
    """Return the last line of a rank's stderr, which of a traceback names the error; empty where there is none.

    Only the bytes from `begin` to `end` count. `lines` returns so many of the last ones, with ` / ` between them.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END) if end is None else end
            begin = file.seek(max(begin, end - 2 * SAID_CHARACTERS))
            return last_lines(file.read(end - begin).decode(errors="replace"), lines)[-SAID_CHARACTERS:]
    except OSError:  # a rank that died before its log was made
        return ""


def last_lines(text: str, count: int = 1) -> str:
    """Return the last lines that are not blank, without colours and other signs that steer a terminal."""
    lines = ("".join(filter(str.isprintable, line)).strip() for line in COLOUR.sub("", text).splitlines())
    return " / ".join([line.removeprefix("jobkit: ") for line in lines if line][-count:])
