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

from jobkit.config.load import Loaded
from jobkit.config.schema import MirrorConfig
from jobkit.disk import Looks
from jobkit.display import Display
from jobkit.errors import JobkitError
from jobkit.run import records
from jobkit.run.files import write_json
from jobkit.run.journal import read_status
from jobkit.run.records import Drill, Interruption
from jobkit.run.rundir import FRAMEWORK, RunDir
from jobkit.run.status import State
from jobkit.run.view import view
from jobkit.slurm import jobs
from jobkit.submission import transaction
from jobkit.submission.follow import LocalStopper
from jobkit.submission.plan import LaunchPlan, Target, make_plan
from jobkit.submission.signals import Signals
from jobkit.verify import compare
from jobkit.verify.compare import Difference, Excused, Trace
from jobkit.verify.explain import difference_lines, interruption_words, relative_words
from jobkit.verify.forgotten import MOST_NAMED, Forgotten, forgotten, hint_lines, late_lines, lines_of, too_late
from jobkit.verify.plan import KINDS, interruptions
from jobkit.verify.source import mentioned

NEVER = 1_000_000_000
"""An interval of saves, in steps, that no verification reaches: its drill says when to save."""

POLL_SECONDS = 0.1

EARLIER = "more --steps, or earlier events by `verify: {params: ...}` in the YAML"


class RunFailed(JobkitError):
    """A run of the verification did not finish."""


@dataclass(kw_only=True)
class Report:
    """The result of a verification."""

    equal: bool = False
    """True if nothing differs and nothing was forgotten."""
    steps: int = 0
    ranks: int = 1
    lines: list[str] = field(default_factory=list)
    difference: Difference | None = None
    found: list[Forgotten] = field(default_factory=list)
    """What was forgotten, and hints."""
    excused: list[str] = field(default_factory=list)
    """What differs between two straight runs."""
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
    ranks: int | None = None
    """As the user has asked; None for those of the YAML."""
    shows: bool = False
    """True to show the runs' progress."""
    _number: int = 0
    _has_files: bool = False
    """True if a framework writes files of its own: they go to the disk where a snapshot was meant."""

    @property
    def shorten(self) -> int:
        """Steps of a pass, and between two evaluations, at most."""
        return -(-self.steps // 3)

    def run(self) -> Report:
        """Run everything that is needed. Raises RunFailed, and the errors of a submission."""
        shutil.rmtree(self.runs_dir, ignore_errors=True)
        began = time.monotonic()
        straight = self._straight()
        course = compare.course_of(straight)
        taken, items = course.last - course.first, interruptions(course)
        report = Report(steps=taken, ranks=len(straight))
        report.missing = [kind for kind in KINDS if kind not in {item.kind for item in items}]
        if not items:
            raise RunFailed(
                f"the training ended after {taken} steps, too few for an interruption: it needs "
                "more steps, or an earlier checkpoint"
            )
        self.say("to come: " + "\n         ".join(map(interruption_words, self._as_done(items))))
        if report.missing:
            self.say(f"not exercised: {', '.join(report.missing)} ({EARLIER})")
        interrupted = self._trace("interrupted", items)
        items = self._as_done(items)
        difference, again, excused = compare.first_difference(straight, interrupted), None, compare.Excused()
        if difference is not None or any(item.is_finding for item in forgotten(straight, interrupted)):
            again = self._trace("straight-again", [])
            excused = compare.differing(straight, again)
            report.excused = excused.words
            change = compare.first_difference(straight, again)
            if change is not None and (excused.samples or excused.leaves & compare.trained(straight)):
                report.difference, report.is_nondeterministic = change, True
                report.lines = _nondeterministic(change, straight, self.code)
                return report
            difference = compare.first_difference(straight, interrupted, excused)
        seconds = time.monotonic() - began
        if difference is not None:
            self._blame(report, difference, (straight, interrupted, again), items, excused)
        else:
            report.found = forgotten(straight, interrupted, again)
            report.equal = not any(item.is_finding for item in report.found)
            done = (
                f"{len(items)} interruptions, steps repeated: {compare.repeated_steps(interrupted)}; "
                f"{_listed(compare.seen(straight, excused))} have the same bits ({seconds:.0f} s)"
            )
            apart = f"; not compared, because two straight runs differ: {', '.join(report.excused)}"
            if taken < self.steps:
                done += f"; the training ended before the {self.steps} steps"
                done += f", as each pass was cut to {self.shorten}" if course.epoch_ends else ""
            first = "=> equal" if report.equal else "what is compared is equal"
            report.lines = [f"{first} over {taken} steps: {done}{apart if report.excused else ''}"]
            report.lines += lines_of(_findings(report), self.code)
            hints = [item for item in report.found if not item.is_finding]
            report.lines += hint_lines(hints, self.code) if report.equal else []
            report.lines += late_lines(too_late(straight, interrupted), self.code)
        report.lines += _notes(straight)
        return report

    def _straight(self) -> Trace:
        """Return the trace of the straight run. Two ranks become three where that costs nothing: the sum of two numbers
        has no order, and may hide one."""
        straight = self._trace("straight", [])
        divides = next(line.divides_by_three for line in straight[0] if line.event == "restored")
        if len(straight) != 2 or divides is None:
            return straight
        if not divides or self.target.scheduler != "local" or self.ranks:
            self.say("two ranks have no order of sums: --ranks 3 shows more")
            return straight
        self.say("two ranks have no order of sums: once more, with three")
        self.target = with_ranks(self.target, 3)
        return self._trace("straight-3", [])

    def _as_done(self, items: Sequence[Interruption]) -> tuple[Interruption, ...]:
        """Return the interruptions as they came about."""
        return tuple(
            dataclasses.replace(item, kind="disk") if item.kind == "memory" and self._has_files else item
            for item in items
        )

    def _blame(
        self,
        report: Report,
        difference: Difference,
        traces: tuple[Trace, Trace, Trace | None],
        items: Sequence[Interruption],
        excused: Excused,
    ) -> None:
        """Report the difference that a single interruption makes; else that of all of them."""
        straight, trace, again = traces
        likely = sorted(items, key=lambda item: abs(item.attempt - difference.line.attempt + 1))
        for item in likely if difference.line.attempt > 2 else ():  # else there was a single one before it
            single = [dataclasses.replace(item, attempt=1)]
            other = self._trace(f"{item.kind.replace(' ', '-')}-alone", single)
            alone = compare.first_difference(straight, other, excused)
            if alone is not None:
                report.lines = [f"a single {interruption_words(item)} shows it"]
                difference, trace, items = alone, other, single
                break
        report.difference = difference
        report.found = forgotten(straight, trace, again, at=difference)
        report.lines += difference_lines(difference, items)
        report.lines += lines_of(report.found[:MOST_NAMED], self.code)

    @property
    def code(self) -> Path:
        """The folder that the runs take their code from."""
        return next((self.runs_dir / ".code").glob("[0-9a-f]*"), self.folder).resolve()

    def _trace(self, name: str, items: Sequence[Interruption]) -> Trace:
        """Run once, and return the trace."""
        config = self.loaded.config
        checkpoint = dataclasses.replace(config.checkpoint, every=NEVER, memory=NEVER, best=None)
        config = dataclasses.replace(config, name=name, mirror=MirrorConfig(), after=[], checkpoint=checkpoint)
        if config.seed is None:  # else runs differ by nothing but their numbers
            config = dataclasses.replace(config, seed=0)
        plan = make_plan(dataclasses.replace(self.loaded, config=config), self.runs_dir, self.target)
        drill = Drill(steps=self.first + self.steps, shorten=self.shorten, interruptions=list(items))

        def prepare(plan: LaunchPlan) -> None:
            records.write(plan.run.drill_file, drill)
            self.prepare(plan.run)

        self._number += 1
        began, display = time.monotonic(), Display(name)
        os.environ["PYTHONHASHSEED"] = str(self._number)  # this command does nothing else
        with Signals():  # a SIGTERM is as good as Ctrl-C
            outcome = transaction.submit(plan, self.folder, prepare=prepare)
            run, looks = outcome.run, Looks()
            try:
                while (now := looks.at(view, run)) is None or not now.is_over:
                    if self.shows and (progress := looks.at(RunDir.progress, run)) is not None:
                        display.show(dataclasses.replace(progress, total_steps=self.first + self.steps))
                    time.sleep(POLL_SECONDS if outcome.process is not None else 10 * POLL_SECONDS)
            except KeyboardInterrupt:
                if outcome.process is not None:
                    LocalStopper(run, outcome.process, Display(run.name)).ask(read_status(run), kills=True)
                elif outcome.job_id is not None:
                    jobs.cancel(outcome.job_id)
                self.say("interrupted: nothing is proven")
                raise
            finally:
                display.close()
        if outcome.process is not None:
            outcome.process.wait()
        if now.state != State.FINISHED:
            ended = now.status.attempt.ended if now.status.attempt is not None else None
            traceback = f"\n{ended.traceback.rstrip()}" if ended is not None and ended.traceback else ""
            raise RunFailed(f"the run {run.name} of the verification: {now.state}, {now.words}{traceback}")
        if not run.trace_folder.exists():
            raise RunFailed("the program of `command:` has no loop of jobkit's, so that there is nothing to compare")
        self._has_files = any(run.checkpoints.glob(f"step_*/{FRAMEWORK}"))
        trace = compare.read_trace(run)
        steps, seconds = compare.course_of(trace).last - self.first, time.monotonic() - began
        self.say(f"{name}: {steps} steps, {len(trace)} rank(s), {seconds:.0f} s")
        return trace


def with_ranks(target: Target, ranks: int) -> Target:
    """Return a place with so many ranks on one node."""
    return dataclasses.replace(target, entry={**target.entry, "nodes": 1, "tasks_per_node": ranks})


def _findings(report: Report) -> list[Forgotten]:
    return [item for item in report.found if item.is_finding]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _nondeterministic(change: Difference, straight: Trace, folder: Path) -> list[str]:
    """Return the words for two straight runs that differ, with the place in the code of the first that does."""
    files = {Path(about.file) for lines in straight.values() for line in lines for about in line.about.values()}
    names = [change.name, *change.name.split(".")[:2]] if change.kind != "values" else [change.name]
    places = (mentioned(sorted(files), name, folder) for name in reversed(names) if name)
    place = next((mention for mention in places if mention), "")
    what = f"{change.name or change.kind}{f' ({place})' if place else ''} after {change.line.step} steps"
    return [
        f"two straight runs differ: {what}, {change.first} | {change.second}{relative_words(change)}",
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
    files = sorted({file for lines in straight.values() for line in lines for file in line.files})
    lines += [f"written outside the run directory, and not restored: {', '.join(files)}"] if files else []
    too_much = {name: size for lines in straight.values() for line in lines for name, size in line.left_out.items()}
    large = [f"{name} ({size / 2**30:.1f} GiB)" if size else name for name, size in too_much.items() if name]
    large += ["what lies deeper"] if "" in too_much else []
    return [*lines, f"too large or too odd to look at: {', '.join(large[:MOST_NAMED])}"] if large else lines


def note(file: Path, report: Report) -> None:
    """Remember for `status` when a run's code and values were verified."""
    file.parent.mkdir(parents=True, exist_ok=True)
    value = {"time": time.time(), "equal": report.equal, "nondeterministic": report.is_nondeterministic}
    write_json(file, value, durable=False)
