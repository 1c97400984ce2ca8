"""A submission under the run's lock makes one job, whatever is killed, slow or done twice. Slurm is a few scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.runs import wait_until

from jobkit.cli.main import main
from jobkit.config.load import load, read_resolved, read_source
from jobkit.errors import InputError, SchedulerError, SchedulerTimeout
from jobkit.run.journal import Journal, events
from jobkit.run.records import AttemptBegan, AttemptEnded, Cancelled, Finished, Refused, Submitted
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.view import views
from jobkit.slurm import commands
from jobkit.submission import after, sbatch, sweep, transaction
from jobkit.submission.plan import make_plan, target
from jobkit.submission.transaction import Outcome, Which

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_ANSWER = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"

SBATCH = """\
echo "$@" >>{folder}/calls
cp {folder}/runs/*/events.jsonl {folder}/journal 2>/dev/null
env >{folder}/env
[ -z "$SUBMITTED_BY_A_SLOW_SBATCH" ] || sleep 0.5
if [ -e {folder}/refusal ]; then cat {folder}/refusal >&2; exit 1; fi
last=$(sed -n 's/^#SBATCH --array=\\(0-\\)\\?\\([0-9]*\\).*/\\2/p' "${{@: -1}}")
tasks=$(( ${{last:-0}} + 1 ))
queued=$(cat {folder}/queue | wc -l)
if [ -e {folder}/limit ] && [ $((queued + tasks)) -gt $(cat {folder}/limit) ]; then
    echo "sbatch: error: AssocMaxSubmitJobLimit" >&2
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size\
 and/or time limits)" >&2
    exit 1
fi
if [ -e {folder}/kills ]; then kill -9 $PPID; sleep 0.5; fi  # it has asked the controller, which queues the job
id=$(( queued + 17 ))
for word in "$@"; do case "$word" in --comment=*) comment=${{word#--comment=}};; esac; done
for task in $(seq 0 $((tasks - 1))); do
    [ -e {folder}/forgets ] || echo "$id${{last:+_$task}}|PENDING|N/A|N/A||p|Priority|$comment" >>{folder}/queue
done
if [ -e {folder}/silence ]; then cat {folder}/silence >&2; exit 1; fi
echo $id
"""


class Slurm:
    """Scripts on PATH that stand for Slurm's commands, and the queue that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = folder / "queue"
        self.queue.touch()
        self.program("sbatch", SBATCH.format(folder=folder))
        self.answer()

    def program(self, name: str, script: str) -> None:
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)

    def answer(self, most_tasks: int = 1001) -> None:
        """Let the controller answer questions; an array has at most `most_tasks`."""
        self.program("squeue", f"cat {self.queue}")
        config = "ClusterName             = box\nSlurmctldHost[0]        = head\nSlurmctldPort           = 6817"
        config += f"\nMaxArraySize            = {most_tasks}"
        partition = "PartitionName=p Default=YES TotalNodes=9 State=UP MaxNodes=UNLIMITED MaxTime=UNLIMITED"
        shown = f'if [ "$2" = config ]; then echo "{config}"; else echo "{partition} MaxCPUsPerNode=UNLIMITED"; fi'
        self.program("scontrol", shown)

    def be_away(self) -> None:
        for name in ("squeue", "scontrol"):
            self.program(name, f"echo '{AWAY}' >&2; exit 1")

    def says(self, file: str, words: str = "") -> None:
        (self.folder / file).write_text(words)

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A stand-in for Slurm, and a project in the current folder."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setattr(sbatch, "PAUSE_SECONDS", 0.0123)
    monkeypatch.setattr(sbatch, "PATIENCE_SECONDS", 0.2)
    commands._config.cache_clear()
    project = tmp_path / "project"
    project.mkdir()
    (project / "toy.py").write_text("def train(rank): ...\n")
    (project / "toy.yaml").write_text("name: toy\ntask: toy:train\nparams: {key: '${oc.env:TOY_SECRET}'}\n")
    monkeypatch.setenv("TOY_SECRET", "s3cret")
    monkeypatch.chdir(project)
    yield Slurm(tmp_path)
    commands._config.cache_clear()


def submit(slurm: Slurm, which: Which = "newest") -> Outcome:
    loaded = load(Path("toy.yaml"))
    place = target(loaded.config, local=False, cluster="slurm")
    return transaction.submit(make_plan(loaded, slurm.folder / "runs", place), Path.cwd(), which=which)


def run_of(slurm: Slurm) -> RunDir:
    (folder,) = (slurm.folder / "runs").glob("toy-*")
    return RunDir(folder)


def status_of(run: RunDir) -> Status:
    return Journal(run).status


def end(run: RunDir, *, finished: bool = False) -> None:
    """Let the run's job have done an attempt, and be gone."""
    journal = Journal(run)
    journal.append(AttemptBegan(attempt=1, token=str(journal.status.token), job_id="17"))
    journal.append(AttemptEnded(attempt=1, cause="finished" if finished else "stopped", next="stop"))
    if finished:
        journal.append(Finished(result={"loss": 1.0}))


def test_a_run_keeps_the_seed_that_it_began_with(slurm: Slurm) -> None:
    """Before `params.seed` counted, a YAML without `seed` meant 0."""
    Path("toy.yaml").write_text("name: toy\ntask: toy:train\nparams: {seed: 3}\n")
    run = submit(slurm).run
    assert read_resolved(run.config_file).seed == 3
    end(run)
    run.config_file.write_text(run.config_file.read_text().replace("\nseed: 3\n", "\nseed: 0\n"))
    slurm.says("queue")
    assert submit(slurm).started
    assert read_resolved(run.config_file).seed == 0
    assert [event.config["seed"] for event in events(run) if isinstance(event, Submitted)] == [3, 0]
    end(run)
    assert read_resolved(submit(slurm, "new").run.config_file).seed == 3


def test_everything_is_written_before_sbatch_and_nothing_after(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOBKIT_PAGE", "JOBKIT_TOKEN", "SUBMITIT_EXECUTOR", "SBATCH_JOB_NAME"):
        monkeypatch.setenv(name, "theirs")
    outcome = submit(slurm)
    run = outcome.run
    assert (outcome.started, outcome.job_id, outcome.before.state) == (True, "17", "new")
    (event,) = events(run)
    assert isinstance(event, Submitted)
    assert (event.number, event.scheduler, event.cluster, event.entry) == (1, "slurm", "box@head:6817", "slurm")
    assert event.token.startswith(f"jobkit:{run.name}:1:")
    assert event.folder == str(Path.cwd())
    assert event.config == {"name": "toy", "seed": 0, "params": {"key": "${oc.env:TOY_SECRET}"}}
    assert (slurm.folder / "journal").read_text() == run.journal_file.read_text()
    assert slurm.calls == [f"--parsable --comment={event.token} {run.batch_script}"]
    assert run.batch_script.stat().st_mode & 0o777 == 0o600
    assert run.pickle_file.exists()
    assert (run.code / "toy.py").read_text() == Path("toy.py").read_text()
    assert run.code.resolve().name == event.code
    assert read_resolved(run.config_file).params == {"key": "s3cret"}
    written = [file for file in run.path.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]
    assert written == []
    assert "theirs" not in (slurm.folder / "env").read_text()
    assert not run.submit_lock().is_held()


def test_a_run_that_is_queued_or_finished_is_not_submitted_again(slurm: Slurm) -> None:
    first = submit(slurm)
    again = submit(slurm)
    assert (again.started, again.before.state, again.job_id) == (False, "queued", first.job_id)
    end(first.run, finished=True)
    slurm.queue.write_text("")
    third = submit(slurm)
    assert (third.started, third.before.state, third.before.status.result) == (False, "finished", {"loss": 1.0})
    assert len(slurm.calls) == 1


def test_a_run_that_stopped_or_lost_its_job_continues(slurm: Slurm) -> None:
    run = submit(slurm).run
    slurm.queue.write_text("")
    lost = submit(slurm)
    assert (lost.started, lost.before.state) == (True, "lost")
    end(run)
    stopped = submit(slurm)  # its job may still be completing: it can begin nothing
    assert (stopped.started, stopped.before.state) == (True, "interrupted")
    Journal(run).append(Cancelled())
    assert submit(slurm).started
    tokens = [event.token for event in events(run) if isinstance(event, Submitted)]
    assert [token.split(":")[2] for token in tokens] == ["1", "2", "3", "4"]
    assert len(set(tokens)) == 4


def test_a_refusal_leaves_no_new_run_and_tells_an_old_one(slurm: Slurm) -> None:
    slurm.says("refusal", "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (MaxSubmit)")
    with pytest.raises(SchedulerError, match="MaxSubmit"):
        submit(slurm)
    assert list((slurm.folder / "runs").glob("toy-*")) == []
    (slurm.folder / "refusal").unlink()
    run = submit(slurm).run
    end(run)
    slurm.says("refusal", "sbatch: error: Batch job submission failed: MaxSubmit")
    with pytest.raises(SchedulerError):
        submit(slurm)
    assert isinstance(list(events(run))[-1], Refused)
    assert status_of(run).state == "interrupted"
    (slurm.folder / "refusal").unlink()
    assert submit(slurm).started


def test_silence_of_the_scheduler_is_no_answer(slurm: Slurm) -> None:
    run = submit(slurm).run
    slurm.be_away()
    with pytest.raises(SchedulerError, match="second job"):
        submit(slurm)
    assert len(slurm.calls) == 1
    slurm.answer()
    end(run)
    slurm.be_away()
    commands._config.cache_clear()
    with pytest.raises(SchedulerError):
        submit(slurm)
    assert len(slurm.calls) == 1
    assert status_of(run).state == "interrupted"


def test_a_controller_that_comes_back_is_waited_for(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "PATIENCE_SECONDS", 60.0)  # on a busy machine one sbatch takes longer than the others'
    slurm.says("refusal", "sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    slurm.program(
        "sbatch",
        f"{SBATCH.format(folder=slurm.folder)}".replace("exit 1; fi", f"rm {slurm.folder}/refusal; exit 1; fi", 1),
    )
    assert submit(slurm).job_id == "17"
    assert len(slurm.calls) == 2


def test_ctrl_c_ends_the_wait_for_a_controller(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.says("refusal", "sbatch: error: Batch job submission failed: Unable to contact slurm controller")

    sleep = time.sleep

    def press(seconds: float) -> None:
        if seconds == sbatch.PAUSE_SECONDS:
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", press)
    with pytest.raises(SchedulerError):
        submit(slurm)
    assert len(slurm.calls) == 1
    assert list((slurm.folder / "runs").glob("toy-*")) == []


def test_an_sbatch_without_an_answer_is_looked_for_and_not_repeated(slurm: Slurm) -> None:
    slurm.says("silence", NO_ANSWER)
    assert submit(slurm).job_id == "17"
    run = run_of(slurm)
    end(run)
    slurm.queue.write_text("")
    slurm.says("forgets")
    with pytest.raises(SchedulerTimeout):
        submit(slurm)
    assert len(slurm.calls) == 2
    assert status_of(run).state == "queued"  # it may come: its token is the newest, and nobody else's
    (slurm.folder / "forgets").unlink()
    (slurm.folder / "silence").unlink()
    assert submit(slurm).started


def test_fresh_makes_a_new_run_and_the_same_command_means_the_newest(slurm: Slurm) -> None:
    first = submit(slurm).run
    second, third = submit(slurm, "new").run, submit(slurm, "new").run
    assert [second.name, third.name] == [f"{first.name}-2", f"{first.name}-3"]
    assert submit(slurm).run.path == third.path
    assert len(slurm.calls) == 3


def start(slurm: Slurm, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    command = [sys.executable, "-m", "jobkit.submit", "toy.yaml", "--cluster", "slurm", "--json", *words]
    environment = {**os.environ, **variables, "JOBKIT_RUNS": str(slurm.folder / "runs")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_submissions_at_once_make_one_job(slurm: Slurm) -> None:
    both = [start(slurm, SUBMITTED_BY_A_SLOW_SBATCH="1") for _ in range(2)]
    answers = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(answer["started"] for answer in answers) == [False, True]
    assert {answer["job_id"] for answer in answers} == {"17"}
    assert len(slurm.calls) == 1


def test_a_submission_killed_beside_its_sbatch_is_not_made_twice(slurm: Slurm) -> None:
    slurm.says("kills")
    killed = start(slurm)
    assert killed.wait() == -signal.SIGKILL
    (slurm.folder / "kills").unlink()
    again = submit(slurm)  # waits until sbatch, which holds the lock too, has ended
    assert (again.started, again.job_id, again.before.state) == (False, "17", "queued")
    assert len(slurm.calls) == 1


def test_ctrl_c_before_the_job_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    git = f"touch {tmp_path}/lists; exec sleep 1000"
    (Path.cwd() / ".git").mkdir()
    slurm.program("git", git)
    process = start(slurm)
    wait_until((tmp_path / "lists").exists, "git")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75
    assert list((slurm.folder / "runs").glob("toy-*")) == []
    assert slurm.calls == []


def test_bad_input_of_the_runs_directory_is_refused(slurm: Slurm) -> None:
    (slurm.folder / "runs").write_text("")
    with pytest.raises(InputError):
        submit(slurm)
    assert slurm.calls == []


def test_a_run_after_another_one_depends_on_its_job(slurm: Slurm) -> None:
    first, runs = submit(slurm), slurm.folder / "runs"
    loaded = load(Path("toy.yaml"), ["seed=2", "clusters={slurm: {dependency: singleton}}"])
    loaded = after.resolve(loaded, ["toy"], runs)
    place = target(loaded.config, local=False, cluster="slurm")
    second = transaction.submit(make_plan(loaded, runs, place), Path.cwd())
    assert f"#SBATCH --dependency=singleton,afterany:{first.job_id}\n" in second.run.batch_script.read_text()
    assert read_resolved(second.run.config_file).after == [first.run.name]
    assert [event.after for event in events(second.run) if isinstance(event, Submitted)] == [[first.run.name]]


# Sweeps


def submit_sweep(slurm: Slurm, count: int, *, max_running: int | None = None, odd: str = "") -> sweep.SweepOutcome:
    """Submit a run for each seed; `odd` is one more word of each second run."""
    source, runs_dir = read_source(Path("toy.yaml")), slurm.folder / "runs"
    words = [[(f"seed={seed}", "here"), *([(odd, "here")] if odd and seed % 2 else [])] for seed in range(count)]
    place = target(source.loaded().config, local=False, cluster="slurm")
    points = [(str(point), source.loaded(point)) for point in words]
    plans = sweep.plan(points, lambda loaded: make_plan(loaded, runs_dir, place))
    return sweep.submit(sweep.Sweep.of(list(plans.values())), Path.cwd(), max_running)


def test_points_that_only_say_where_a_run_goes_are_refused(slurm: Slurm) -> None:
    source = read_source(Path("toy.yaml"))
    points = [(text, source.loaded([(text, "here")])) for text in ("resources.nodes=1", "resources.nodes=2")]
    place = target(source.loaded().config, local=False, cluster="slurm")
    with pytest.raises(InputError, match="same run"):
        sweep.plan(points, lambda loaded: make_plan(loaded, slurm.folder / "runs", place))


def states(slurm: Slurm, outcome: sweep.SweepOutcome) -> list[str]:
    return [now.state for now in views([plan.run for plan in outcome.sweep.plans])]


def test_a_sweep_is_one_array_whose_runs_are_whole(slurm: Slurm) -> None:
    outcome = submit_sweep(slurm, 3, max_running=2)
    assert (outcome.jobs, outcome.unsubmitted, states(slurm, outcome)) == ([("17", 3)], [], ["queued"] * 3)
    runs = [plan.run for plan in outcome.sweep.plans]
    assert outcome.sweep.file.read_text().split() == [run.name for run in runs]
    events_of = [list(events(run)) for run in runs]
    assert [event.task for (event,) in events_of] == [0, 1, 2]  # type: ignore[attr-defined]
    assert len({(event.token, event.code) for (event,) in events_of}) == 1  # type: ignore[attr-defined]
    assert (runs[0].submitit / "array.sh").stat().st_mode & 0o777 == 0o600
    assert "--array=0-2%2\n" in (runs[0].submitit / "array.sh").read_text()
    for task, run in enumerate(runs):  # its successor needs no other run
        script = run.batch_script.read_text()
        assert f"--array={task}\n" in script and f"jobkit_runs=([{task}]={run.path})" in script
        assert run.pickle_file.exists() and read_resolved(run.config_file).seed == task
    again = submit_sweep(slurm, 3)
    assert (again.jobs, again.sweep.name, len(slurm.calls)) == ([], outcome.sweep.name, 1)
    more = submit_sweep(slurm, 5)  # a run of two sweeps is one run
    assert (more.jobs, more.counts()) == ([("20", 2)], "5 runs: 3 queued, 2 started")


def test_a_limit_takes_as_many_as_it_allows_and_the_same_command_submits_the_rest(slurm: Slurm) -> None:
    slurm.says("limit", "11")
    outcome = submit_sweep(slurm, 32)
    assert ([count for _, count in outcome.jobs], len(outcome.unsubmitted)) == ([8, 2, 1], 21)
    assert len(list((slurm.folder / "runs").glob("toy-????????"))) == 11, "what was refused left nothing"
    assert len(submit_sweep(slurm, 32).unsubmitted) == 21
    (slurm.folder / "limit").unlink()
    rest = submit_sweep(slurm, 32)
    assert (sum(count for _, count in rest.jobs), states(slurm, rest)) == (21, ["queued"] * 32)
    keys = [line.split("|")[0] for line in slurm.queue.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 32


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_sweep_with_runs_left_has_the_exit_code_of_what_can_be_continued(
    slurm: Slurm, form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says("limit", "1")
    words = ["submit", "toy.yaml", "--cluster", "slurm", "--runs-dir", str(slurm.folder / "runs")]
    words += ["--sweep", "seed=0,1,2", *form]
    assert main(words) == 75
    assert "2 run(s) are left, the same command submits them: " in capsys.readouterr().err
    (slurm.folder / "limit").unlink()
    assert main(words) == 0
    assert len(slurm.queue.read_text().splitlines()) == 3


def test_runs_of_a_sweep_that_nobody_knows_of_are_not_submitted(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_sweep(slurm, 2)
    slurm.be_away()
    words = ["submit", "toy.yaml", "--cluster", "slurm", "--runs-dir", str(slurm.folder / "runs")]
    assert main([*words, "--sweep", "seed=0,1"]) == 75
    assert "2 run(s) are left" in capsys.readouterr().err


def test_unequal_points_and_small_arrays_are_several_arrays(slurm: Slurm) -> None:
    slurm.answer(most_tasks=2)
    slurm.says("limit", "3")
    outcome = submit_sweep(slurm, 5, max_running=4, odd="resources.nodes=2")
    runs = [plan.run for plan in outcome.sweep.plans]
    assert (outcome.jobs, outcome.unsubmitted) == ([("17", 2), ("19", 1)], [runs[1].name, runs[3].name])
    (slurm.folder / "limit").unlink()
    rest = submit_sweep(slurm, 5, max_running=4, odd="resources.nodes=2")
    assert (rest.jobs, rest.unsubmitted, states(slurm, rest)) == ([("20", 2)], [], ["queued"] * 5)
    assert [now.job_id for now in views(runs)] == ["17_0", "20_0", "17_1", "20_1", "19_0"]
    arrays = {0: ["--array=0-1%2", "--nodes=1"], 4: ["--array=0%1", "--nodes=1"], 1: ["--array=0-1%4", "--nodes=2"]}
    for first, options in arrays.items():
        script = (runs[first].submitit / "array.sh").read_text()
        assert [option for option in options if f"#SBATCH {option}\n" in script] == options
    assert submit_sweep(slurm, 5, odd="resources.nodes=2").jobs == []


def test_a_refused_sweep_leaves_no_new_run_and_tells_an_old_one(slurm: Slurm) -> None:
    run = submit_sweep(slurm, 1).sweep.plans[0].run
    end(run)
    slurm.queue.write_text("")
    slurm.says("refusal", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(SchedulerError, match="Invalid account"):
        submit_sweep(slurm, 3)
    assert [folder.name for folder in (slurm.folder / "runs").glob("toy-????????")] == [run.name]
    assert (isinstance(list(events(run))[-1], Refused), status_of(run).state) == (True, "interrupted")


def test_a_sweep_killed_beside_its_sbatch_is_not_made_twice(slurm: Slurm) -> None:
    slurm.says("kills")
    killed = start(slurm, "--sweep", "seed=0,1,2")
    assert killed.wait() == -signal.SIGKILL
    (slurm.folder / "kills").unlink()
    again = submit_sweep(slurm, 3)
    assert (again.jobs, states(slurm, again), len(slurm.calls)) == ([], ["queued"] * 3, 1)
