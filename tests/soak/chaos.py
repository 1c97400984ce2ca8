#!/usr/bin/env python3
"""Interrupts a small training in every way that a cluster has, and says whether it came through.

    tests/soak/chaos.py --seed 1 --events 20       # on a Slurm of its own, or where there is none on this machine
    tests/soak/chaos.py --only kill_rank,preempt   # some interruptions, or some moments, only
    tests/soak/chaos.py --soak                     # five seeds of 20 events on Slurm and here; a table for the README

A run has come through when it finished by itself, its weights are bit for bit those of the uninterrupted run, each step
is once in TensorBoard, no more steps were repeated than had to be, and nothing of it was left behind.
The exit code is 0 only if all did.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if (
    importlib.util.find_spec("jobkit") is None
    and (python := Path(__file__).resolve().parents[2] / ".venv/bin/python").exists()
):
    os.execv(python, [str(python), *sys.argv])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from chaos_actions import ACTIONS
from chaos_plan import KINDS, MOMENTS, STEPS, Event, choose, draw
from chaos_run import Live, Row, Stuck, reference_weights
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster, MissingPackages

SOAK_SEEDS = range(1, 6)
STEPS_AN_EVENT, STEPS_A_MINUTE = 60, 600
"""More than an event, or an attempt of a minute, can take: the rest is trained without pauses when all is over."""


@dataclass
class Trial:
    """One run through one plan."""

    seed: int
    place: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Empty: it came through."""
    unasked: list[str] = field(default_factory=list)
    """Attempts that ended although nothing had been done to them."""
    stuck: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "place": self.place,
            "problems": self.problems,
            "unasked": self.unasked,
            "rows": [r.as_dict() for r in self.rows],
        }


class Chaos:
    """Trials in one directory; those of one length share the run that nothing interrupts."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self.path = path
        self.say = say
        self._references: dict[int, bytes] = {}

    def reference(self, steps: int) -> bytes:
        """The weights after an uninterrupted training of this length."""
        if steps not in self._references:
            self._references[steps] = reference_weights(self.path / f"uninterrupted-{steps}", steps)
        return self._references[steps]

    def trial(self, seed: int, plan: Sequence[Event], cluster: Cluster | None) -> Trial:
        """Interrupt one run as planned, on a cluster or on this machine, and judge it."""
        trial = Trial(seed, "slurm" if cluster else "local")
        steps = 40 + sum(STEPS_A_MINUTE if event.kind == "time_limit" else STEPS_AN_EVENT for event in plan)
        reference = self.reference(steps)
        name = f"{trial.place}-{seed}"
        number = len(list(self.path.glob(f"{name}.*"))) + 1
        live = Live(self.path / f"{name}.{number}", cluster, steps, list(plan))
        trial.rows = live.rows
        self.say(f"{trial.place}, seed {seed}: {len(plan)} interruptions of {live.project.path}")
        try:
            live.go(list(plan), ACTIONS, self.say)
        except Stuck as stuck:
            trial.stuck = True
            trial.problems.append(str(stuck))
        trial.problems += live.verdict(reference)
        trial.unasked = live.unasked()
        if trial.stuck:
            self.say(live.abandon())
        if trial.unasked:
            self.say(f"interrupted by something else: {', '.join(trial.unasked)}")
        if (trial.problems or trial.unasked) and cluster:
            shutil.copytree(cluster.dir / "log", live.project.path / "slurm", dirs_exist_ok=True)
        self.say(f"{trial.place}, seed {seed}: " + ("; ".join(trial.problems) or "finished, and everything equal"))
        return trial


def table(trials: Sequence[Trial]) -> str:
    """Markdown: what each kind of interruption cost, over all trials."""
    lines = [
        "| interruption | how many | in place | attempts until it trained again | steps repeated (min / median / max)"
        " | seconds until it trained again (median) | went on by itself | finished, weights equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    pairs = [(trial, row) for trial in trials for row in trial.rows]
    groups = [(name, [pair for pair in pairs if pair[1].event.kind == name]) for name in KINDS]
    groups += [
        (f"any, {MOMENTS[m]}", [pair for pair in pairs if pair[1].event.moment == m]) for m in MOMENTS if m != STEPS
    ]
    groups.append(("**all**", pairs))
    for name, group in groups:
        if not group:
            continue
        rows = [row for _, row in group if row.resumed is not None]
        repeated, seconds = [row.repeated for row in rows] or [0], [row.seconds or 0.0 for row in rows] or [0.0]
        well = sum(not row.problems and row.resumed is not None for _, row in group)
        good = sum(not trial.problems for trial, _ in group)
        attempts = statistics.mean([row.attempts for row in rows] or [0])
        lines.append(
            f"| {name} | {len(group)} | {sum(row.began == 'in place' for _, row in group)} | {attempts:.1f}"
            f" | {min(repeated)} / {statistics.median(repeated):g} / {max(repeated)}"
            f" | {statistics.median(seconds):.0f} | {share(well, len(group))} | {share(good, len(group))} |"
        )
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    return "always" if part == whole else f"{part} of {whole}"


@contextlib.contextmanager
def slurm_of_our_own() -> Iterator[Cluster]:
    # Not in --dir: Slurm's sockets need a short path.
    directory = tempfile.TemporaryDirectory(prefix="jobkit-chaos-", dir="/tmp")
    # Twenty waits of 121 s in BeginTime would be 40 minutes of nothing; docs/evidence.md names the settings.
    with directory as path, Cluster(path, **QUICK) as cluster:
        yield cluster


def parse(arguments: list[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {name:16} {kind.text}" for name, kind in KINDS.items())
    moments = "\n".join(f"  {name:16} {text}" for name, text in MOMENTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"interruptions:\n{listed}\n\nmoments:\n{moments}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="decides the whole plan (default: 1)")
    parser.add_argument("--events", type=int, default=20, help="how many interruptions (default: 20)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--slurm", dest="place", action="store_const", const="slurm", help="on a Slurm started for this")
    where.add_argument("--local", dest="place", action="store_const", const="local", help="on this machine")
    parser.add_argument(
        "--only", default="", metavar="NAME,NAME", help="draw from these interruptions and moments only"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.add_argument("--soak", action="store_true", help="five seeds on Slurm, then five here; print the table")
    parser.add_argument("--dir", type=Path, help="keep the runs here; else they are removed if all is well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write plans, rows and verdicts there")
    return parser.parse_args(arguments)


def plans(options: argparse.Namespace) -> list[tuple[int, str, list[Event]]]:
    """(seed, place, plan) of every trial that was asked for; ValueError for a name that is not one."""
    places = [
        options.place or ("slurm" if shutil.which("slurmctld", path=os.environ["PATH"] + ":/usr/sbin") else "local")
    ]
    if not options.soak:
        return [(options.seed, p, draw(options.seed, options.events, *choose(options.only, p))) for p in places]
    places = [options.place] if options.place else ["slurm", "local"]
    found = [(s, p, draw(s, options.events, *choose(options.only, p))) for p in places for s in SOAK_SEEDS]
    if "slurm" in places and not options.only:
        found.append((6, "slurm", draw(6, 3, ["time_limit"], [STEPS])))
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        planned = plans(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.dry_run:
        for seed, place, plan in planned:
            print(f"{place}, seed {seed}", *(f"{e.number:3} {e.kind:16} {e}" for e in plan), sep="\n")
        return 0
    path = (options.dir or Path(tempfile.mkdtemp(prefix="jobkit-chaos-runs-"))).resolve()
    trials = []
    with contextlib.ExitStack() as stack:
        try:
            on_slurm = any(place == "slurm" for _, place, _ in planned)
            cluster = stack.enter_context(slurm_of_our_own()) if on_slurm else None
        except MissingPackages as missing:
            print(missing, file=sys.stderr)
            return 2
        chaos = Chaos(path)
        for seed, place, plan in planned:
            trials.append(chaos.trial(seed, plan, cluster if place == "slurm" else None))
            if options.json:
                options.json.write_text(json.dumps([trial.as_dict() for trial in trials], indent=1) + "\n")
    print("", table(trials), sep="\n")
    good = not any(trial.problems for trial in trials)
    if good and not options.dir:
        shutil.rmtree(path)
    elif not good:
        print(f"the runs: {path}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
