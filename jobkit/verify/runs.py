"""A verification: a straight run, an interrupted run; if they differ, another straight run and single interruptions.

    plan + Drill --submission--> run (the production path) --trace--> compare --> Report

Each run has another PYTHONHASHSEED, so that an order of sets shows as a difference. cli/verify.py calls `verify`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.display import Display
from jobkit.errors import JobkitError
from jobkit.run import records
from jobkit.run.disk import Looks
from jobkit.run.files import write_json
from jobkit.run.journal import read_status
from jobkit.run.load import Loaded
from jobkit.run.records import Drill, Interruption
from jobkit.run.rundir import FRAMEWORK, RunDir
from jobkit.run.schema import MirrorConfig
from jobkit.run.view import view
from jobkit.slurm import jobs
from jobkit.submission import transaction
from jobkit.submission.follow import Stop
from jobkit.submission.plan import LaunchPlan, Target, make_plan
from jobkit.submission.signals import Signals
from jobkit.verify import compare
from jobkit.verify.compare import Difference, Trace
from jobkit.verify.explain import difference_lines, interruption_words, locals_line, relative_words
from jobkit.verify.plan import KINDS, interruptions

NEVER = 1_000_000_000
"""An interval of saves, in steps, that no verification reaches: its drill says when to save."""

POLL_SECONDS = 0.1


class RunFailed(JobkitError):
    """A run of the verification did not finish."""


@dataclass(kw_only=True)
class Report:
    """The result of a verification."""

    equal: bool
    lines: list[str] = field(default_factory=list)
    difference: Difference | None = None
    is_nondeterministic: bool = False
    """True if two straight runs differ: then nothing is lost, the program's own values change."""
    missing: list[str] = field(default_factory=list)
    """Kinds of interruptions for which the steps had no place."""


@dataclass(kw_only=True)
class Verification:
    """The program to verify, and where.

    Verification(loaded=loaded, folder=Path.cwd(), runs_dir=runs / ".verify", target=target, steps=20).run()
    """

    loaded: Loaded
    folder: Path
    """The code."""
    runs_dir: Path
    """For the runs of the verification: it is deleted before."""
    target: Target
    steps: int
    say: Callable[[str], None] = print
    prepare: Callable[[RunDir], None] = lambda run: None
    """Called with each run directory: it may put a checkpoint there."""
    first: int = 0
    """The step at which the runs begin."""
    _number: int = 0
    _has_files: bool = False
    """True if a framework writes files of its own: they go to the disk where a snapshot was meant."""

    def run(self) -> Report:
        """Run everything that is needed. Raises RunFailed, and the errors of a submission."""
        shutil.rmtree(self.runs_dir, ignore_errors=True)
        began = time.monotonic()
        straight = self._trace("straight", [])
        course = compare.course_of(straight)
        taken = course.last - course.first
        items = interruptions(course)
        exercised = {item.kind for item in items}
        report = Report(equal=False, missing=[kind for kind in KINDS if kind not in exercised])
        self.say(f"straight: {taken} steps, {len(straight)} rank(s)")
        if not items:
            raise RunFailed(
                f"the training ended after {taken} steps, too few for an interruption: it needs "
                "more steps, or an earlier checkpoint"
            )
        interrupted = self._trace("interrupted", items)
        items = self._as_done(items)
        self.say(f"interrupted: {'; '.join(map(interruption_words, items))}")
        report.difference = compare.first_difference(straight, interrupted)
        ignored: frozenset[str] = frozenset()
        if report.difference is not None:
            again = self._trace("straight-again", [])
            ignored = compare.differing_values(straight, again)
            change = compare.first_difference(straight, again, ignored)
            if change is not None:
                report.difference, report.is_nondeterministic = change, True
                report.lines = _nondeterministic(change)
                return report
            report.difference = compare.first_difference(straight, interrupted, ignored)
        if report.difference is None:
            report.equal = True
            few = f" (the training ended before the {self.steps} that were asked for)" if taken < self.steps else ""
            apart = f", apart from what differs between two straight runs as well: {', '.join(sorted(ignored))}"
            report.lines = [
                f"=> equal over {taken} steps{few}{apart if ignored else ''}: {len(items)} interruptions, "
                f"{compare.repeated_steps(interrupted)} steps repeated; {', '.join(compare.seen(straight))} "
                f"and result have the same bits ({time.monotonic() - began:.0f} s)"
            ]
        else:
            report.difference, report.lines = self._blamed(straight, interrupted, report.difference, items, ignored)
        report.lines += _notes(straight)
        return report

    def _as_done(self, items: Sequence[Interruption]) -> tuple[Interruption, ...]:
        """Return the interruptions as they came about."""
        return tuple(
            dataclasses.replace(item, kind="disk") if item.kind == "memory" and self._has_files else item
            for item in items
        )

    def _blamed(
        self,
        straight: Trace,
        interrupted: Trace,
        difference: Difference,
        items: Sequence[Interruption],
        ignored: frozenset[str],
    ) -> tuple[Difference, list[str]]:
        """Return the difference that a single interruption makes, and the lines about it; else that of all of them."""
        if difference.place.attempt == 2:  # there was a single one before it
            return difference, _blame(straight, interrupted, difference, items)
        course = compare.course_of(straight)
        for kind in KINDS:
            single = interruptions(course, [kind])
            if not single:
                continue
            trace = self._trace(kind.replace(" ", "-"), single)
            single = self._as_done(single)
            alone = compare.first_difference(straight, trace, ignored)
            if alone is not None:
                return alone, [
                    f"a single {interruption_words(single[0])} shows it",
                    *_blame(straight, trace, alone, single),
                ]
        return difference, _blame(straight, interrupted, difference, items)

    def _trace(self, name: str, items: Sequence[Interruption]) -> Trace:
        """Run once, and return the trace."""
        config = self.loaded.config
        checkpoint = dataclasses.replace(config.checkpoint, every=NEVER, memory=NEVER, best=None)
        config = dataclasses.replace(config, name=name, mirror=MirrorConfig(), after=[], checkpoint=checkpoint)
        plan = make_plan(dataclasses.replace(self.loaded, config=config), self.runs_dir, self.target)
        steps, shorten = self.first + self.steps, max(1, self.steps // 3)
        drill = Drill(steps=steps, shorten=shorten, interruptions=list(items))

        def prepare(plan: LaunchPlan) -> None:
            records.write(plan.run.drill_file, drill)
            self.prepare(plan.run)

        self._number += 1
        os.environ["PYTHONHASHSEED"] = str(self._number)  # this command does nothing else
        with Signals():  # a SIGTERM is as good as Ctrl-C
            outcome = transaction.submit(plan, self.folder, prepare=prepare)
            run, looks = outcome.run, Looks()
            try:
                while (now := looks.at(view, run)) is None or not now.is_over:
                    time.sleep(POLL_SECONDS if outcome.process is not None else 10 * POLL_SECONDS)
            except KeyboardInterrupt:
                if outcome.process is not None:
                    Stop(run, outcome.process, Display(run.name)).ask(read_status(run), kills=True)
                elif outcome.job_id is not None:
                    jobs.cancel(outcome.job_id)
                raise
        if outcome.process is not None:
            outcome.process.wait()
        if now.state != "finished":
            ended = now.status.attempt.ended if now.status.attempt is not None else None
            traceback = f"\n{ended.traceback.rstrip()}" if ended is not None and ended.traceback else ""
            raise RunFailed(f"the run {run.name} of the verification: {now.state}, {now.words}{traceback}")
        if not run.trace_folder.exists():
            raise RunFailed("the program of `command:` has no loop of jobkit's, so that there is nothing to compare")
        self._has_files = any(run.checkpoints.glob(f"step_*/{FRAMEWORK}"))
        return compare.read_trace(run)


def _blame(straight: Trace, trace: Trace, difference: Difference, items: Sequence[Interruption]) -> list[str]:
    hint = locals_line(straight, trace, difference)
    return [*difference_lines(difference, items), *([hint] if hint else [])]


def _nondeterministic(change: Difference) -> list[str]:
    what = f"{change.name or change.kind} at step {change.place.step}, {change.first} | {change.second}"
    return [
        f"two straight runs differ: {what}{relative_words(change)}",
        "=> nothing is shown: the program itself, or kernels that depend on the process's history, are not "
        "deterministic; try deterministic=true behind the same command",
    ]


def _notes(straight: Trace) -> list[str]:
    """Return lines about values that no comparison sees, and about files that no restart restores."""
    hints = {
        "samples": "ctx.loader and ctx.batches show them, but for streams",
        "logged values": "ctx.log shows them",
    }
    unseen = [f"{name} ({hint})" for name, hint in hints.items() if name not in compare.seen(straight)]
    lines = [f"not seen, and not compared: {', '.join(unseen)}"] if unseen else []
    files = sorted({file for places in straight.values() for place in places for file in place.files})
    return [*lines, f"written outside the run directory, and not restored: {', '.join(files)}"] if files else lines


def note(file: Path, report: Report) -> None:
    """Remember for `status` when a run's code and values were verified."""
    file.parent.mkdir(parents=True, exist_ok=True)
    value = {"time": time.time(), "equal": report.equal, "nondeterministic": report.is_nondeterministic}
    write_json(file, value, durable=False)
