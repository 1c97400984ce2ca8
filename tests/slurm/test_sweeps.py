"""A sweep is one job array; each of its runs is requeued, cancelled and continued by itself."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path

import pytest
from harness import in_process
from harness.project import Project, causes, describe, events, names, status, step, wait_for
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster

HELD = ("--cluster", "slurm", "clusters.slurm.hold=true")


@pytest.fixture
def project(tmp_path: Path, slurm: Cluster) -> Project:
    """One rank a run."""
    return one_rank(tmp_path, slurm)


def one_rank(path: Path, slurm: Cluster) -> Project:
    made = Project(path, slurm.env)
    yaml = made.path / "toy.yaml"
    yaml.write_text(yaml.read_text().replace("nodes: 2, tasks_per_node: 2", "nodes: 1"))
    return made


def sweep(project: Project, *arguments: str, expect: int = 0) -> in_process.Done:
    return in_process.jobkit(project, "submit", "toy.yaml", *arguments, expect=expect)


def tasks(slurm: Cluster, script: str) -> list[str]:
    """Ids of the queued and running tasks that have a batch script in a project."""
    listed = str(slurm.command("squeue", "--array", "--noheader", "--format=%i %o")).splitlines()
    return sorted(line.split()[0] for line in listed if script in line)


def by_seed(project: Project) -> dict[int, Path]:
    return {seed_of(run): run for run in project.runs}


def seed_of(run: Path) -> int:
    return int(re.search(r"^seed: (\d+)$", (run / "config.yaml").read_text(), re.MULTILINE)[1])


def test_tasks_are_preempted_cancelled_and_continued_each_by_itself(project: Project, slurm: Cluster) -> None:
    project.slow_down(1)
    done = sweep(project, "--cluster", "slurm", "params.steps=12", "--sweep", "seed=0,1,2", "--max-running", "2")
    assert "sweep toy/s1: 3 runs (3 new), one code snapshot" in done.stdout
    runs = by_seed(project)
    array = status(runs[0])["job_id"].partition("_")[0]
    assert f"job {array}: 3 task(s), at most 2 at once" in done.stdout
    assert {seed: status(run)["job_id"] for seed, run in runs.items()} == {seed: f"{array}_{seed}" for seed in range(3)}
    assert len({(run / "code" / status(run)["code"]).resolve() for run in runs.values()}) == 1

    for seed in (0, 1):
        wait_for("three steps", lambda run=runs[seed]: step(run) >= 3, runs[seed])
    assert status(runs[2])["state"] == "queued"
    cancelled = project.start("cancel", status(runs[1])["job_id"])
    wait_for("the end of the cancelled run", lambda: status(runs[1])["state"] == "cancelled", runs[1])
    slurm.preempt(f"{array}_0")
    assert cancelled.wait(timeout=600) == 0

    for seed in (0, 2):
        wait_for("the end", lambda run=runs[seed]: status(run)["state"] == "finished", runs[seed])
    assert causes(runs[0])[0] == "preempted", describe(runs[0])
    assert status(runs[0])["attempts"][1]["first_step"] == status(runs[0])["attempts"][0]["last_step"] > 0
    assert status(runs[1])["state"] == "cancelled"

    again = sweep(project, "--cluster", "slurm", "params.steps=12", "--sweep", "seed=0,1,2")
    assert "sweep toy/s1: 3 runs (1 continued, 2 finished)" in again.stdout
    wait_for("the end", lambda: status(runs[1])["state"] == "finished", runs[1])
    assert status(runs[1])["attempts"][1]["first_step"] > 0
    # Its command continues it by itself, and says so.
    assert "seed=1" in status(runs[1])["command"] and "--sweep" not in status(runs[1])["command"]
    assert "already finished" in in_process.jobkit(project, "resume", runs[1].name).stdout


def test_a_task_that_slurm_does_not_requeue_is_submitted_again_alone(project: Project, slurm: Cluster) -> None:
    project.slow_down(1)
    sweep(project, "--cluster", "slurm", "params.steps=8", "retry.in_place=false", "--sweep", "seed=0,1")
    runs = by_seed(project)
    first = status(runs[1])["job_id"]
    slurm.command("scontrol", "update", f"JobId={first}", "Requeue=0")
    wait_for("two steps", lambda: step(runs[1]) >= 2, runs[1])
    slurm.command("scancel", "--signal=KILL", f"{first}.0")
    for run in runs.values():
        wait_for("the end", lambda run=run: status(run)["state"] == "finished", run)
    again = status(runs[1])["attempts"][1]
    assert again["began"] == "resubmitted", describe(runs[1])
    assert again["job_id"] != first and again["job_id"].endswith("_1")
    assert len(status(runs[0])["attempts"]) == 1


def test_a_sweep_cut_off_after_sbatch_is_found_again(project: Project, slurm: Cluster) -> None:
    sweep(project, *HELD, "--sweep", "seed=0,1,2")
    ids = {seed: status(run)["job_id"] for seed, run in by_seed(project).items()}
    for run in project.runs:
        journal = run / "events.jsonl"
        lines = journal.read_text().splitlines(keepends=True)
        assert json.loads(lines[-1])["event"] == "submitted"
        journal.write_text("".join(lines[:-1]))  # as if the process had died between sbatch and the journal
    again = sweep(project, *HELD, "--sweep", "seed=0,1,2")
    assert "3 runs (3 held)" in again.stdout
    assert {seed: status(run)["job_id"] for seed, run in by_seed(project).items()} == ids
    assert tasks(slurm, str(project.path)) == sorted(ids.values())
    for run in project.runs:
        slurm.command("scancel", status(run)["job_id"])


def test_a_run_of_a_sweep_that_is_being_submitted_is_waited_for(project: Project, slurm: Cluster) -> None:
    """Another command for one of its runs starts no second job."""
    sweeping = project.start("submit", "toy.yaml", *HELD, "--sweep", "seed=range(30)")
    wait_for("the first run", lambda: any("submitting" in names(run) for run in project.runs))
    run = next(run for run in project.runs if "submitting" in names(run))
    alone = project.jobkit("submit", "toy.yaml", *HELD, f"seed={seed_of(run)}")
    assert sweeping.wait(timeout=600) == 0
    assert "already queued" in alone.stdout, alone
    assert names(run).count("submitted") == 1
    assert len(tasks(slurm, str(project.path))) == 30
    slurm.command("scancel", status(run)["job_id"].partition("_")[0])


def test_a_sweep_that_is_interrupted_before_its_job_leaves_nothing(project: Project, slurm: Cluster) -> None:
    sweeping = project.start("submit", "toy.yaml", *HELD, "--sweep", "seed=range(60)")
    wait_for("the first run", lambda: any("submitting" in names(run) for run in project.runs))
    sweeping.send_signal(signal.SIGINT)
    printed = sweeping.communicate(timeout=600)
    if sweeping.returncode == 75:
        assert not project.runs and not tasks(slurm, str(project.path))
    else:  # it was faster than the signal
        assert sweeping.returncode == 0, printed
        slurm.command("scancel", tasks(slurm, str(project.path))[0].partition("_")[0])


def test_the_file_is_what_is_wanted(project: Project, slurm: Cluster) -> None:
    yaml = project.path / "toy.yaml"
    text = yaml.read_text()
    yaml.write_text(text + "sweep: {seed: [0, 1, 2]}\n")
    assert "3 runs (3 new)" in sweep(project, *HELD).stdout
    runs = by_seed(project)
    job = status(runs[2])["job_id"]
    yaml.write_text(text + "sweep: {seed: [2, 3]}\n")
    changed = sweep(project, *HELD)
    assert "sweep toy/s1: 2 runs (1 new, 1 held)" in changed.stdout
    assert f"no longer wanted: {runs[0].name} (held), {runs[1].name} (held); " in changed.stderr
    told = json.loads(sweep(project, *HELD, "--json").stdout)
    assert [one["state"] for one in told["runs"]] == ["held", "held"] and len(told["former"]) == 2
    pruned = sweep(project, *HELD, "--prune")
    assert "no longer wanted, and cancelled: " in pruned.stderr
    assert [status(runs[seed])["state"] for seed in range(3)] == ["cancelled", "cancelled", "queued"]
    assert "no longer wanted" not in sweep(project, *HELD).stderr
    assert len(tasks(slurm, str(project.path))) == 2
    assert status(runs[2])["job_id"] == job, "tasks of its array were cancelled, and it was not"
    for one in tasks(slurm, str(project.path)):
        slurm.command("scancel", one)


def test_what_somebody_else_wants_is_not_pruned(project: Project, slurm: Cluster) -> None:
    sweep(project, *HELD, "--sweep", "seed=0,1,2")
    runs = by_seed(project)
    sweep(project, *HELD, "--sweep", "seed=1", "params.sleep=0,1")
    jobkit = in_process.jobkit
    jobkit(project, "cancel", runs[2].name)
    jobkit(project, "submit", "toy.yaml", *HELD, "seed=2")
    pruned = sweep(project, *HELD, "--sweep", "seed=0", "--prune")
    assert "no longer wanted" not in pruned.stderr
    assert "cancel_requested" not in names(runs[1]), "another sweep wants it"
    assert names(runs[2])[-1] == "submitted", "it was submitted by itself"
    for one in tasks(slurm, str(project.path)):
        slurm.command("scancel", one)


def test_the_first_run_is_finished_before_the_others_start(project: Project, slurm: Cluster) -> None:
    project.slow_down(1)
    mended, task = project.path / "mended", project.path / "mytask.py"
    text = task.read_text()
    begins = re.search(r"^def train\(.*\n", text, re.MULTILINE)
    assert begins is not None
    task.write_text(text.replace(begins[0], f"{begins[0]}    open({str(mended)!r}).close()\n"))
    words = ("--cluster", "slurm", "params.steps=3", "--sweep", "seed=0,1,2", "--first", "--max-running", "1")
    sweep(project, *words)
    runs = by_seed(project)
    first = status(runs[0])["job_id"]
    wait_for("its failure", lambda: status(runs[0])["state"] == "failed", runs[0])
    mended.touch()
    again = sweep(project, *words)
    assert "after job" not in again.stdout, "the others wait for this one: it cannot wait for their job"
    assert {status(runs[seed])["job_id"].partition("_")[0] for seed in (1, 2)} != {first.partition("_")[0]}
    for run in runs.values():
        wait_for("the end", lambda run=run: status(run)["state"] == "finished", run)
    ended = status(runs[0])["attempts"][-1]["ended"]
    assert all(ended < attempt["started"] for seed in (1, 2) for attempt in status(runs[seed])["attempts"])


def test_one_is_split_where_slurm_takes_no_larger_array(tmp_path: Path, short_dir: Path) -> None:
    with Cluster(short_dir, nodes=1, max_array_size=3, **QUICK) as cluster:
        project = one_rank(tmp_path, cluster)
        done = sweep(project, *HELD, "--sweep", "seed=range(7)", "--max-running", "2")
        arrays = sorted({status(run)["job_id"].partition("_")[0] for run in project.runs}, key=int)
        assert f"job {', '.join(arrays)}: 7 task(s), at most 2 at once" in done.stdout
        assert len(tasks(cluster, str(project.path))) == 7
        for before, after in itertools.pairwise(arrays):
            assert f"Dependency=afterany:{before}_*" in str(cluster.command("scontrol", "show", "job", f"{after}_0"))
        for run in project.runs:
            assert events(run)[-1]["event"] == "submitted"


def throttle(slurm: Cluster, array: str) -> str:
    return slurm.job(f"{array}_0")["ArrayTaskThrottle"]


def test_the_limit_of_a_sweep_holds_over_its_arrays(project: Project, slurm: Cluster) -> None:
    sweep(project, *HELD, "--sweep", "seed=0,1,2,3", "--max-running", "2")
    runs = by_seed(project)
    first = status(runs[0])["job_id"].partition("_")[0]
    in_process.jobkit(project, "cancel", runs[3].name)
    again = sweep(project, *HELD, "--sweep", "seed=0,1,2,3", "--max-running", "2")
    second = status(runs[3])["job_id"].partition("_")[0]
    assert f"job {second}: 1 task(s), at most 2 at once, after job {first}" in again.stdout
    assert f"afterany:{first}_*" in slurm.job(f"{second}_0")["Dependency"]

    changed = sweep(project, *HELD, "--sweep", "seed=0,1,2,3", "--max-running", "3")
    assert f"job {first}, {second}: at most 3 at once from now on" in changed.stdout
    assert {throttle(slurm, first), throttle(slurm, second)} == {"3"}, "one waits for the other"

    in_process.jobkit(project, "cancel", runs[0].name)
    room = sweep(project, *HELD, "--sweep", "seed=0,1,2,3", "--max-running", "4")
    third = status(runs[0])["job_id"].partition("_")[0]
    assert f"job {third}: 1 task(s), at most 4 at once\n" in room.stdout
    assert slurm.job(f"{third}_0")["Dependency"] == "(null)", "there is room for all"

    shared = sweep(project, *HELD, "--sweep", "seed=0,1,2,3", "--max-running", "2")
    assert f"job {third}, {first}, {second}: at most 2 at once from now on" in shared.stdout
    assert [slurm.job(f"{one}_{task}")["ArrayTaskThrottle"] for one, task in ((third, 0), (first, 1))] == ["1", "1"]
    for array in (first, second, third):
        slurm.command("scancel", array)


def test_a_limit_that_no_arrays_can_share_is_told(project: Project, slurm: Cluster) -> None:
    for seeds in ("0", "0,1"):
        sweep(project, *HELD, "--sweep", f"seed={seeds}")
    told = sweep(project, *HELD, "--sweep", "seed=0,1", "--max-running", "1")
    assert ": at most 2 at once from now on" in told.stdout
    for run in project.runs:
        slurm.command("scancel", status(run)["job_id"])


def test_tasks_that_somebody_cancels_with_scancel_are_cancelled(project: Project, slurm: Cluster) -> None:
    sweep(project, *HELD, "--sweep", "seed=0,1,2,3")
    runs = by_seed(project)
    array = status(runs[0])["job_id"].partition("_")[0]
    after = ("submit", "toy.yaml", "--cluster", "slurm", "name=next", "--after", runs[1].name)
    in_process.jobkit(project, *after)
    (following,) = [run for run in project.runs if run.name.startswith("next-")]
    slurm.command("scancel", f"{array}_[1-2]")
    listed = in_process.jobkit(project, "list", "toy*").stdout
    assert listed.count("probably cancelled") == 2 and listed.count("held") == 2
    assert "probably cancelled" in in_process.jobkit(project, "status", runs[2].name).stdout
    wait_for("that it is told", lambda: status(following)["state"] == "cancelled", following)
    assert f"it comes after {runs[1].name}, which was cancelled" in status(following)["error"]
    slurm.command("scancel", array)
    assert in_process.jobkit(project, "list", "toy*").stdout.count("probably cancelled") == 4
    assert "4 runs (4 continued)" in sweep(project, *HELD, "--sweep", "seed=0,1,2,3").stdout
    slurm.command("scancel", status(runs[0])["job_id"].partition("_")[0])


def test_runs_of_a_command_whose_words_differ_are_one_array(project: Project, slurm: Cluster) -> None:
    yaml = "name: words\ncommand: [echo, 'number ${params.n}']\nparams: {n: 0}\nclusters: {slurm: {partition: low}}\n"
    (project.path / "words.yaml").write_text(yaml)
    done = project.jobkit("submit", "words.yaml", "--sweep", "params.n=1,2,3")
    assert re.search(r"^job \d+: 3 task\(s\)$", done.stdout, re.MULTILINE), done.stdout
    for run in project.runs:
        wait_for("its end", lambda run=run: status(run)["state"] == "finished", run)
    said = sorted((run / "logs/1/rank_0.out").read_text().strip() for run in project.runs)
    assert said == ["number 1", "number 2", "number 3"]
