"""python -m jobkit.worker EXP.yaml: one rank of a YAML's run, under torchrun, mpirun, srun or by itself.

A program, as jobkit/submit.py is: it parses, checks as a submission does, and calls the rank's own modules.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, InputError, JobkitError, nearest
from jobkit.log import configure, log

if TYPE_CHECKING:
    from filelock import FileLock

    from jobkit.run.config import Config
    from jobkit.run.experiment import LoadedConfig
    from jobkit.run.rundir import RunDir
    from jobkit.worker.disks import Disks
    from jobkit.worker.launcher import Launch
    from jobkit.worker.rendezvous import Rendezvous

DESCRIPTION = (
    "One rank of the experiment of a YAML: start it with torchrun, mpirun, srun or python, which say how many ranks "
    "there are. The same command continues the run; so does `jobkit submit`, and the other way round."
)
EPILOG = (
    "Exit codes: 0 finished, 1 the run failed, 2 the input is wrong and nothing was started, 75 interrupted: the same "
    "command continues the run. A launcher may put a code of its own in their place."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what is wrong: rank 0 alone is to say it."""
        unknown = re.match(r"unrecognized arguments: .*?(--[\w-]+)", message)
        hint = nearest(unknown[1], self._option_string_actions) if unknown else ""
        raise InputError(f"command line: {message}{hint} (python -m jobkit.worker --help)")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m jobkit.worker", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("experiment", type=Path, metavar="EXP.yaml", help="what to train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to set, as in params.lr=3e-4")
    parser.add_argument("--fresh", action="store_true", help="a new run, even though one with this config exists")
    parser.add_argument("--demo", action=argparse.BooleanOptionalAction, help="force the YAML's `demo:` on or off")
    parser.add_argument(
        "--runs-dir", type=Path, metavar="DIR", help="where runs live (default: $JOBKIT_RUNS or ./runs)"
    )
    # torch.distributed.launch adds it; LOCAL_RANK says the same.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank from the command line to the end of its run; returns the exit code."""
    from jobkit.worker.launcher import find_topology

    configure("stdout")
    try:
        launch = find_topology(os.environ)
    except JobkitError as error:  # nobody knows who is rank 0
        return _say(error)
    arguments, loaded, problem = None, None, None
    try:
        arguments = _parse(argv)
        loaded = _load(arguments, launch)
    except (JobkitError, OSError) as error:
        problem = error if isinstance(error, JobkitError) else _of_disk(error)
    if problem is not None and launch.topology.world_size == 1:
        return _say(problem)  # before torch is imported
    from jobkit.run.runs import default_runs_dir

    given = arguments.runs_dir if arguments is not None else None
    runs_dir = (given or default_runs_dir()).absolute()
    return _run_rank(arguments, loaded, problem, launch, runs_dir)


def _load(arguments: argparse.Namespace, launch: Launch) -> LoadedConfig:
    """The config, checked as for a submission; warnings and notes are rank 0's to print."""
    from jobkit.run.experiment import load
    from jobkit.submission.plan import LaunchPlan
    from jobkit.submission.submit import check

    loaded = load(arguments.experiment, arguments.overrides, arguments.demo)
    is_main, before = launch.topology.rank == 0, log.level
    for note in loaded.notes if is_main else ():
        print(note, file=sys.stderr)
    if launch.topology.local_rank == 0:  # of each machine: its files are its own
        log.setLevel(before if is_main else "ERROR")
        try:
            with loaded.places.locating_errors():
                here = Path.cwd()
                check(
                    LaunchPlan(run=here / "runs" / "run", config=loaded.config, cluster="local", scheduler="local"),
                    here,
                )
        finally:
            log.setLevel(before)
    return loaded


def _run_rank(
    arguments: argparse.Namespace | None,
    loaded: LoadedConfig | None,
    problem: JobkitError | None,
    launch: Launch,
    runs_dir: Path,
) -> int:
    from jobkit.run.rundir import launch_file
    from jobkit.worker.rendezvous import rendezvous

    is_main = launch.topology.rank == 0
    found: Rendezvous | None = None
    start: Callable[[], int] | None
    try:
        file = launch_file(runs_dir, _key(launch))
        if launch.rendezvous == "file":
            file.parent.mkdir(parents=True, exist_ok=True)
        found = rendezvous(launch, file, purpose="jobkit.worker")
        told = found.group.gather(None if problem is None else [str(problem), problem.exit_code])
        if problems := {rank: one for rank, one in enumerate(told) if one is not None}:
            return _say_problems(problems, is_main)
        assert arguments is not None and loaded is not None
        start = _begin_run(found, loaded.config, launch, runs_dir, fresh=arguments.fresh)
    except JobkitError as error:
        if is_main or (found is None and launch.topology.local_rank == 0):
            return _say(error)  # where the ranks have met, all of them learn of it
        return error.exit_code
    except OSError as error:
        return _say(_of_disk(error))
    # Outside of what is caught: an OSError of the task is not the runs directory's.
    return start() if start is not None else EXIT_FINISHED


def _key(launch: Launch) -> str:
    """What tells this launch from another in the same runs directory; the command line where its launcher does not."""
    if launch.key != launch.launcher.replace(" ", "-"):
        return launch.key
    return f"{launch.key}-{hashlib.sha256(repr(sys.argv[1:]).encode()).hexdigest()[:8]}"


def _say_problems(problems: dict[int, tuple[str, int]], is_main: bool) -> int:
    """Say, on rank 0, what is wrong on any: each thing once; returns the exit code."""
    if is_main:
        said: dict[str, int] = {}
        for rank, (text, _) in problems.items():
            said.setdefault(text, rank)
        for text, rank in said.items():
            print(f"error: {text}" if rank == 0 else f"error: rank {rank}: {text}", file=sys.stderr)
    return max(code for _, code in problems.values())


def _begin_run(
    found: Rendezvous, config: Config, launch: Launch, runs_dir: Path, *, fresh: bool
) -> Callable[[], int] | None:
    """Begin an attempt of the run, on all ranks together; returns what runs this rank, None for nothing to run."""
    from jobkit.worker.disks import find_disks
    from jobkit.worker.launched import give_config, make_folders, refuse_different_configs, with_ranks
    from jobkit.worker.stop import STOP_SIGNALS

    group = found.group
    refuse_different_configs(config, group)
    config = group.all_or_none(lambda: with_ranks(config, found.topology, None))
    run = _choose_run(found, config, runs_dir, fresh)
    group.all_or_none(lambda: make_folders(run))
    disks = find_disks(run, config, found.topology, group)
    if not config.command:
        STOP_SIGNALS.install()  # from here on a signal waits for the first step boundary
    lock = run.alive_lock()
    begun = group.on_main(lambda: _begin(run, config, launch.launcher, lock))
    if begun is None:
        return None
    number, kept = begun
    group.all_or_none(lambda: run.logs(number).mkdir(parents=True, exist_ok=True))
    give_config(run, config, group, disks)
    if config.command:
        from jobkit.worker.launched_command import run_command

        return partial(run_command, found, run, config, number, disks)
    return partial(_run_task, found, run, config, number, kept, disks, lock)


def _choose_run(found: Rendezvous, config: Config, runs_dir: Path, fresh: bool) -> RunDir:
    """The newest version of the run that any machine has; with `fresh` the one after all of them."""
    from jobkit.run.identity import name_in
    from jobkit.run.rundir import RunDir
    from jobkit.run.runs import version_number
    from jobkit.submission.submit import choose_run

    # torchrun starts the ranks of a run that has failed again, with the same words: to continue it.
    is_restart = any(found.group.gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    own = found.group.all_or_none(lambda: choose_run(config, runs_dir, fresh and not is_restart).name)
    versions = found.group.gather((version_number(own, name_in(runs_dir, config)), own))
    return RunDir(runs_dir / max(versions)[1])


def _begin(run: RunDir, config: Config, launcher: str, lock: FileLock) -> tuple[int, int] | None:
    """On rank 0: (the attempt's number, step of the newest checkpoint so far); None, and said, for nothing to start."""
    from jobkit.run.command_line import to_follow_or_stop
    from jobkit.run.status import State, Status
    from jobkit.submission import job
    from jobkit.worker.launched import begin

    with run.submission_lock():
        before = job.reconcile(run) if run.exists() else Status()
        if before.state == State.FINISHED:
            print(f"already finished{before.at_steps}: {run.path}", flush=True)
            print("for a new run of the same config: the same command, with --fresh", flush=True)
            return None
        if before.state.is_under_way and not before.never_submitted:
            where = f"{'job' if before.scheduler == 'slurm' else 'process'} {before.job_id} ({before.cluster})"
            print(f"already {before.state}: {where}\nrun directory {run.path}", flush=True)
            print(to_follow_or_stop(run.name, has_logs=False), file=sys.stderr)
            return None
        run.keep_number()
        number = begin(run, config, launcher, lock)
        return None if number is None else (number, before.checkpoint or 0)


def _run_task(
    found: Rendezvous, run: RunDir, config: Config, number: int, kept: int, disks: Disks, lock: FileLock
) -> int:
    """What the training function raises goes through: the interpreter's hooks, which `open_run` has set, record it."""
    from jobkit.run.events import Event
    from jobkit.worker.failure import show_stacks_when_asked
    from jobkit.worker.launched import show_first_traceback
    from jobkit.worker.output import survive_full_disks
    from jobkit.worker.rank import join
    from jobkit.worker.script import open_run
    from jobkit.worker.startup.jobkit_torch_threads import wait_at_exit
    from jobkit.worker.task import load_task

    wait_at_exit()
    survive_full_disks()
    show_stacks_when_asked()
    os.environ.update(JOBKIT_RUN=str(run.path), JOBKIT_ATTEMPT=str(number))  # as where jobkit starts the ranks
    assert found.store is not None
    show_first_traceback(found.store)
    try:
        context = open_run(join(found, run, config, number, disks), lock)
    except JobkitError as error:  # on all ranks
        if found.topology.rank == 0:
            run.record(Event.FAILED, attempt=number, cause="crashed", error=str(error))
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    if context.is_main and disks and context.step < kept:
        log.warning("steps %d to %d are repeated: not every machine has a newer checkpoint", context.step, kept - 1)
    sys.path[:] = [str(Path.cwd()), *filter(None, sys.path)]  # where the task is, which jobkit's own imports leave out
    context.finish(load_task(config.task)(context))
    return EXIT_FINISHED


def _of_disk(error: OSError) -> JobkitError:
    from jobkit.run.disk_errors import in_a_line

    return InputError(in_a_line(error))


def _say(error: JobkitError) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted before the run began", file=sys.stderr)
        sys.exit(EXIT_RESUMABLE)
