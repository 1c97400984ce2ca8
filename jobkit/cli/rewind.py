"""jobkit rewind RUN STEP: a run goes back to one of its checkpoints; what came after it is set aside, and kept.

    checkpoints/step_00000300  best -> it   final/   tensorboard/ (a copy)  --> checkpoints/branches/1/
    journal: `rewound`, so that the run is interrupted; the next attempt begins at the step, and cuts its curves there

Under the run's submit lock, as a submission: no job lives, and none begins. Ranks may outlive their job for a while:
without the lease they save nothing more. The event is written last: a command that was killed is completed by the same
command.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import time
from pathlib import Path

from jobkit.cli.arguments import way_out
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run import records
from jobkit.run.files import sync_folder, user_name
from jobkit.run.journal import Journal, events
from jobkit.run.records import Lease, Rewound
from jobkit.run.rundir import CHECKPOINT, RunDir
from jobkit.run.runs import WORDS, find, runs_dir_of
from jobkit.run.status import UNDER_WAY
from jobkit.run.view import View, view
from jobkit.submission import checks
from jobkit.usage import show_examples, to_continue

LINKS = ("latest", "best")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help=WORDS)
    parser.add_argument("step", type=int, metavar="STEP", help="the checkpoint to go back to")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="default: $JOBKIT_RUNS or ./runs")
    show_examples(parser, {"toy 200": "the run goes on from its checkpoint of step 200"})


def run(arguments: argparse.Namespace) -> int:
    """Go back, and print the moved checkpoints and the command that continues the run."""
    runs = find([arguments.name], runs_dir_of(arguments.runs_dir))
    if len(runs) != 1:
        raise InputError(key="RUN", found=arguments.name, allowed="one run")
    (chosen,) = runs
    done = rewind(chosen, arguments.step)
    moved = f"checkpoint(s) of step {', '.join(map(str, done.moved))}" if done.moved else "no checkpoint"
    print(f"{chosen.name} is back at step {done.step}; set aside in {chosen.path / done.branch}: {moved}")
    print(f"to continue it: {to_continue(chosen.path, Journal(chosen).status.submitted)}")
    return EXIT_FINISHED


def rewind(run: RunDir, step: int) -> Rewound:
    """Let a run that is not under way continue from its checkpoint of `step`. Raises InputError with nothing moved."""
    checks.refuse_foreign(run)
    with run.submit_lock():
        now = view(run, locked=True)
        checks.refuse_older(run, now.status)
        if now.state in UNDER_WAY:
            raise InputError(f"it is {now.standing}", key=run.name, hint=way_out(now))
        with run.alive_lock():  # the job of a run that has just ended may still write
            return _rewind(run, step, now)


def _rewind(run: RunDir, step: int, now: View) -> Rewound:
    steps = run.durable_steps()
    branch = run.branches / str(1 + sum(isinstance(event, Rewound) for event in events(run)))
    is_end = step == max(steps, default=None) and not branch.exists()
    if step not in steps or is_end:
        allowed = ", ".join(map(str, steps[:-1])) or "an earlier checkpoint; there is none, --fresh begins anew"
        problem = "it is the newest: the run continues from it anyway" if is_end else ""
        raise InputError(problem, key=f"{run.name}: STEP", found=step, allowed=allowed)
    with run.begin_lock():
        word, host = secrets.token_hex(8), socket.gethostname()
        lease = Lease(attempt=0, writer=word, token="", job_id="", host=host, pid=os.getpid())
        records.write(run.lease_file, lease)
    branch.mkdir(parents=True, exist_ok=True)
    _set_aside(run, step, branch)
    attempt = now.status.open_attempt
    if attempt is not None:  # its job is gone; the next one closes it, and shall not find that it had finished
        _move(run.ends_folder(attempt.number), branch)
    moved = sorted(int(match[1]) for item in branch.iterdir() if (match := CHECKPOINT.fullmatch(item.name)))
    event = Rewound(step=step, branch=str(branch.relative_to(run.path)), moved=moved, user=user_name())
    Journal(run).append(event)
    return event


def _set_aside(run: RunDir, step: int, branch: Path) -> None:
    """Move everything that is later than a step. The newest first: killed in between, a run is at a step in between."""
    if run.tensorboard.exists():  # the next attempt cuts the curves back
        shutil.copytree(run.tensorboard, branch / run.tensorboard.name, dirs_exist_ok=True)
    for item in list(run.checkpoints.iterdir()):  # saves that were killed: one may be whole, and would get its name
        if item.name.startswith((".step_", ".old.")):
            _move(item, branch)
    for later in reversed([other for other in run.durable_steps() if other > step]):
        _move(run.checkpoint(later), branch)
    _move(run.final, branch)
    for link in (run.checkpoints / name for name in LINKS):
        if link.is_symlink() and not link.exists():
            link.unlink()  # ranks make `latest` again; the best one is in the branch
    sync_folder(branch)
    sync_folder(run.checkpoints)


def _move(item: Path, branch: Path) -> None:
    if not item.exists():
        return
    target = branch / item.name
    if target.exists():  # of a command that was killed before its event, and the run had gone on
        target = target.with_name(f"{target.name}.{time.time_ns()}")
    item.rename(target)
