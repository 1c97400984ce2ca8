"""Submitting is safe to repeat, to race and to cut off; what runs is what was submitted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from harness import in_process
from harness.project import Project, describe, events, names, queue, status, step, wait_for
from harness.quick_slurm import NO_ANSWER
from slurm_cluster import Cluster

LONG = ("params.steps=2000", "params.sleep=0.05")


@pytest.fixture
def project(tmp_path: Path, slurm: Cluster) -> Project:
    """On two nodes, one rank each: each rank that starts under Slurm imports torch."""
    made = Project(tmp_path, slurm.env)
    yaml = made.path / "toy.yaml"
    yaml.write_text(yaml.read_text().replace("tasks_per_node: 2", "tasks_per_node: 1"))
    return made


def test_two_simultaneous_submissions_start_one_job(project: Project, slurm: Cluster) -> None:
    processes = [project.start("submit", "toy.yaml", "--cluster", "slurm", *LONG) for _ in range(4)]
    printed = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    (run,) = project.runs
    assert names(run).count("submitted") == 1
    assert len(queue(slurm, project)) == 1
    assert sum("already" in text for text in printed) == 3
    project.jobkit("cancel", run.name)


def test_submitting_a_running_job_says_where_it_is(project: Project) -> None:
    project.submit("--cluster", "slurm", *LONG)
    (run,) = project.runs
    again = project.submit("--cluster", "slurm", *LONG).stdout
    assert "already" in again and status(run)["job_id"] in again and str(run) in again
    project.jobkit("cancel", run.name)


def test_a_job_cancelled_while_it_waits_is_cancelled_and_can_be_resumed(project: Project, slurm: Cluster) -> None:
    with_hold = ("clusters.slurm.hold=true", *LONG)
    project.submit("--cluster", "slurm", *with_hold)
    (run,) = project.runs
    assert status(run)["state"] == "queued"
    slurm.command("scancel", status(run)["job_id"])
    journal = events(run)
    seen = json.loads(project.jobkit("status", run.name, "--json").stdout)
    assert (seen["state"], seen["probably"]) == ("cancelled", "cancelled")
    assert "probably cancelled" in project.jobkit("list").stdout
    assert events(run) == journal  # who looks writes nothing
    project.submit("--cluster", "slurm", *with_hold)
    assert status(run)["state"] == "queued"
    project.jobkit("cancel", run.name)
    assert status(run)["state"] == "cancelled"
    wait_for("an empty queue", lambda: not queue(slurm, project), run)


def test_a_submission_cut_off_after_sbatch_is_found_again(project: Project, slurm: Cluster) -> None:
    project.submit("--cluster", "slurm", "clusters.slurm.hold=true", *LONG)
    (run,) = project.runs
    job = status(run)["job_id"]
    journal = run / "events.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "submitted"
    journal.write_text("".join(lines[:-1]))  # as if the process had died between sbatch and the journal
    done = project.submit("--cluster", "slurm", "clusters.slurm.hold=true", *LONG, "checkpoint.keep=7")
    assert "already queued" in done.stdout and job in done.stdout
    assert "its job keeps checkpoint.keep 3 (not 7); to apply it: " in done.stderr
    assert queue(slurm, project) == [job]
    project.jobkit("cancel", run.name)


def test_a_finished_run_starts_nothing_and_fresh_starts_another(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.submit("--local", "params.steps=3", "resources.nodes=1")
    (run,) = project.runs
    before = names(run)
    assert "already finished" in project.submit("--local", "params.steps=3").stdout
    assert names(run) == before
    project.submit("--local", "params.steps=3", "--fresh", "resources.nodes=1")
    assert [one.name for one in project.runs] == [run.name, f"{run.name}-2"]


def test_a_changed_parameter_is_a_new_run_and_a_changed_partition_is_the_same(project: Project) -> None:
    held = ("--cluster", "slurm", "clusters.slurm.hold=true")
    project.submit(*held)
    project.submit(*held, "clusters.slurm.partition=high", "resources.nodes=1", "checkpoint.every=7")
    assert len(project.runs) == 1
    project.submit(*held, "params.steps=61")
    assert len(project.runs) == 2
    for run in project.runs:
        project.jobkit("cancel", run.name)


def test_an_edit_after_the_submission_does_not_change_what_a_queued_job_runs(project: Project, slurm: Cluster) -> None:
    project.submit("--cluster", "slurm", "clusters.slurm.hold=true", "params.steps=5", "resources.nodes=1")
    (run,) = project.runs
    task = project.path / "mytask.py"
    task.write_text(task.read_text() + "\nraise RuntimeError('edited later')\n")
    slurm.command("scontrol", "release", status(run)["job_id"])
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    assert status(run)["state"] == "finished"


def test_neither_does_one_in_a_src_layout_whose_job_has_a_package_from_its_setup_lines(
    project: Project, slurm: Cluster
) -> None:
    part, provided = project.path / "src/own/part.py", project.path.with_name("provided")
    for folder in (part.parent, provided):
        folder.mkdir(parents=True)
    part.write_text("")
    (provided / "library.py").write_text("")
    (project.path / "mytask.py").write_text(
        "import library, own.part\ndef train(ctx):\n    for step in ctx.steps(2): pass\n    return own.part.__file__\n"
    )
    project.env["PYTHONPATH"] = f"{project.env.get('PYTHONPATH', '')}:{project.path}/src"
    setup = f"clusters.slurm.setup=['cd /; export PYTHONPATH=$PYTHONPATH:{provided}']"
    said = project.submit("--cluster", "slurm", "clusters.slurm.hold=true", setup, "resources.nodes=1").stderr
    assert "mytask.py:1: import library: no module 'library' here" in said
    (run,) = project.runs
    part.write_text("raise RuntimeError('edited later')\n")
    slurm.command("scontrol", "release", status(run)["job_id"])
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    assert status(run)["state"] == "finished", describe(run)
    (code,) = (run / "code").iterdir()
    assert status(run)["result"] == f"{code}/src/own/part.py"


def test_a_later_submission_takes_the_code_as_it_is_then_and_says_what_changed(tmp_path: Path) -> None:
    project = Project(tmp_path)
    process = project.start("submit", "toy.yaml", "--local", "resources.nodes=1", *LONG)
    wait_for("a run directory", lambda: project.runs)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    task = project.path / "mytask.py"
    task.write_text(task.read_text().replace("params.steps", "params.get('short', 20)"))
    (project.path / "more.py").write_text("")
    told = project.submit("--local", "resources.nodes=1", *LONG).stderr
    assert "+ more.py" in told and "~ mytask.py" in told
    assert status(run)["state"] == "finished"
    codes = [event["code"] for event in events(run) if event["event"] == "submitting"]
    assert len(set(codes)) == 2 and all((run / "code" / code / "mytask.py").exists() for code in codes)


def test_a_failing_task_fails_the_run_with_its_error_and_the_other_ranks_end(project: Project, slurm: Cluster) -> None:
    (project.path / "mytask.py").write_text(
        "import torch\n"
        "def train(ctx):\n"
        "    for step in ctx.steps(1000):\n"
        "        if ctx.rank == 1 and step == 3: raise ValueError('no such luck')\n"
        "        ctx.barrier()\n"
    )
    done = project.submit("--local", expect=1)
    (run,) = project.runs
    assert "ValueError: no such luck" in done.stderr and "rank 1" in done.stderr
    assert status(run)["state"] == "failed"
    project.submit("--cluster", "slurm")
    wait_for("the end on Slurm", lambda: len(status(run)["attempts"]) == 6 and status(run)["state"] == "failed", run)
    assert "rank 1: ValueError: no such luck" in status(run)["error"]
    wait_for("an empty queue", lambda: not queue(slurm, project))


def test_follow_shows_a_slurm_run_to_its_end(project: Project) -> None:
    done = project.submit("--cluster", "slurm", "--follow", "params.steps=20", "resources.nodes=1")
    assert "finished at step 20/20" in done.stderr
    (run,) = project.runs
    assert "finished" in project.jobkit("list").stdout
    assert "attempt 1: finished" in project.jobkit("status", run.name).stdout


def test_detach_returns_at_once_and_logs_follow_to_the_end(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(
        "def train(ctx):\n    for step in ctx.steps(5):\n        print('at step', step, flush=True)\n"
    )
    printed = project.submit("--local", "--detach", "resources.nodes=1").stdout
    (run,) = project.runs
    assert str(run) in printed
    shown = project.jobkit("logs", "-f", run.name).stdout
    assert "at step 4" in shown
    assert status(run)["state"] == "finished"


def test_dry_run_prints_config_and_script_and_starts_nothing(project: Project, slurm: Cluster) -> None:
    printed = project.submit("--cluster", "slurm", "--dry-run", "resources.nodes=3").stdout
    assert "nodes: 3" in printed and "#SBATCH --nodes=3" in printed and "#SBATCH --requeue" in printed
    assert "srun" in printed and not project.runs and not queue(slurm, project)
    assert "run directory" in project.submit("--local", "--dry-run").stdout


def test_neither_local_nor_cluster_means_slurm_where_there_is_one(project: Project) -> None:
    project.submit("clusters.slurm.hold=true")
    (run,) = project.runs
    assert status(run)["scheduler"] == "slurm"
    project.jobkit("cancel", run.name)


def test_a_named_cluster_comes_from_the_users_own_config(project: Project, slurm: Cluster) -> None:
    Path(project.env["JOBKIT_CONFIG"]).write_text(
        "clusters: {h100: {scheduler: slurm, partition: high, hold: true, nodes: 3, comment: mine}}\n"
    )
    project.submit("--cluster", "h100")
    (run,) = project.runs
    job = slurm.job(status(run)["job_id"])
    assert (job["Partition"], job["NumNodes"], job["Comment"]) == ("high", "3-3", "mine")
    project.jobkit("cancel", run.name)


def test_a_model_or_loader_that_is_not_tracked_is_refused_before_the_first_step(tmp_path: Path) -> None:
    project = Project(tmp_path)
    task = project.path / "mytask.py"
    task.write_text(task.read_text().replace("ctx.track(model=model, ", "ctx.track("))
    assert "not tracked" in project.submit("--local", "resources.nodes=1", expect=1).stderr
    assert status(project.runs[0])["step"] == 0


def test_an_edit_after_the_end_is_told_and_a_slip_in_a_parameter_too(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.submit("--local", "params.steps=3", "resources.nodes=1")
    task = project.path / "mytask.py"
    task.write_text(task.read_text() + "\n")
    assert "~ mytask.py" in project.submit("--local", "params.steps=3").stderr


# Devices

TELL = 'echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES > seen_${JOBKIT_ATTEMPT}_$RANK; test "$JOBKIT_ATTEMPT" = 2\n'


def test_every_rank_of_a_node_sees_all_the_devices_that_the_user_asked_for(project: Project) -> None:
    (project.path / "tell.sh").write_text(TELL)
    (project.path / "toy.yaml").write_text("name: toy\ncommand: [sh, tell.sh]\nclusters: {slurm: {partition: low}}\n")
    resources = ["resources={nodes: 2, tasks_per_node: 2, gpus_per_task: 1}", "clusters.slurm.gres='gpu:4'"]
    project.submit("--cluster", "slurm", *resources)
    (run,) = project.runs
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    for attempt in (1, 2):  # the second was started in place
        seen = [(project.path / f"seen_{attempt}_{rank}").read_text().split() for rank in range(4)]
        assert [int(local_rank) for local_rank, _ in seen] == [0, 1, 0, 1], describe(run)
        shown = [visible.split(",") for _, visible in seen]
        assert shown[0] == shown[1] and shown[2] == shown[3]
        assert [len(set(visible)) for visible in shown] == [4] * 4


def test_npus_are_asked_for_by_the_name_that_the_cluster_has_for_them(project: Project, slurm: Cluster) -> None:
    (project.path / "tell.sh").write_text("echo $LOCAL_RANK > seen_$RANK\n")
    (project.path / "toy.yaml").write_text("name: toy\ncommand: [sh, tell.sh]\nclusters: {slurm: {partition: low}}\n")
    npus = ["device=npu", "resources={nodes: 1, tasks_per_node: auto, gpus_per_task: 1}"]
    missing = in_process.jobkit(project, "submit", "toy.yaml", "--cluster", "slurm", *npus, expect=2)
    assert "clusters.slurm.gres: missing" in missing.stderr and len(missing.stderr.splitlines()) == 1
    many = in_process.jobkit(project, "submit", "toy.yaml", *npus, "clusters.slurm.gres='npu:9'", expect=2)
    assert "clusters.slurm.gres: found 9 npu(s) on each of 1 node(s), but partition low" in many.stderr
    project.submit("--cluster", "slurm", *npus, "clusters.slurm.gres='npu:2'")
    (run,) = project.runs
    wait_for("the end", lambda: status(run)["state"] in ("finished", "failed"), run)
    seen = [int((project.path / f"seen_{rank}").read_text()) for rank in range(2)]
    assert seen == [0, 1] and status(run)["state"] == "finished", describe(run)
    assert slurm.job(status(run)["attempts"][0]["job_id"])["TresPerNode"] == "gres:npu:2"


# What Slurm refuses

REFUSED = {
    "a partition": (["clusters.slurm.partition=nosuch"], ["nosuch", "sinfo", "clusters.<name>.partition"]),
    "a constraint": (["clusters.slurm.constraint=nosuch"], ["feature"]),
    "a node": (["clusters.slurm.nodelist=nosuch"], ["node name"]),
    "a resource": (["clusters.slurm.gres=nosuch:1"], ["gres"]),
}


@pytest.mark.parametrize(("overrides", "said"), REFUSED.values(), ids=REFUSED)
def test_what_slurm_refuses_is_told_in_one_line_not_queued_and_leaves_no_run(
    project: Project, slurm: Cluster, overrides: list[str], said: list[str]
) -> None:
    done = in_process.jobkit(project, "submit", "toy.yaml", "--cluster", "slurm", *overrides, expect=2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: sbatch: ")
    for part in said:
        assert part in done.stderr
    assert [path.name for path in project.path.glob("runs/*")] in ([], [".locks"])
    assert queued_here(slurm, project) == []


def test_spares_that_the_partition_does_not_have_are_told(project: Project, slurm: Cluster) -> None:
    done = project.submit("--cluster", "slurm", "resources.spares=9", expect=2)
    assert "command line: resources.spares: found 9, but partition low has 4 node(s)" in done.stderr
    assert "with nodes: 2 at most 2" in done.stderr
    assert queued_here(slurm, project) == []


def test_what_no_node_can_meet_is_refused_before_slurm_is_asked(project: Project, slurm: Cluster) -> None:
    for override, said in (
        ("resources.nodes=9", "command line: resources.nodes: found 9, but partition low has 4 node(s)"),
        ("resources.cpus_per_task=99", "command line: resources.cpus_per_task: 1 task(s) of 99 core(s) need 99 cores"),
        ("resources.gpus_per_task=9", "command line: resources.gpus_per_task: found 9 GPU(s) on each of 2 node(s)"),
        ("clusters.slurm.mem=900T", "command line: clusters.slurm.mem: found 900T"),
    ):
        done = in_process.jobkit(project, "submit", "toy.yaml", "--cluster", "slurm", override, expect=2)
        assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert queued_here(slurm, project) == [] and project.runs == []


def test_what_jobkit_refuses_is_not_queued_where_there_is_a_slurm(project: Project, slurm: Cluster) -> None:
    mistakes = {
        "clusters.slurm.partion=low": "did you mean 'partition'?",
        "clusters.slurm.output=x": "jobkit logs",
        "clusters.slurm.scheduler=pbs": "slurm, local",
        "clusters.slurm.setup=5": "found 5",
        "inputs=[/no/such]": "/no/such",
    }
    for override, said in mistakes.items():
        done = in_process.jobkit(project, "submit", "toy.yaml", "--cluster", "slurm", override, expect=2)
        assert done.stderr.startswith("error: ") and said in done.stderr
    for name in ("slrum", "mars"):
        done = in_process.jobkit(project, "submit", "toy.yaml", "--cluster", name, expect=2)
        assert f"--cluster {name}" in done.stderr and "slurm" in done.stderr
    assert not (project.path / "runs").exists()
    assert queued_here(slurm, project) == []


def test_a_controller_that_is_down_is_told_and_leaves_no_run(tmp_path: Path, short_dir: Path) -> None:
    with Cluster(short_dir, nodes=1, **NO_ANSWER) as cluster:
        project = Project(tmp_path, cluster.env)
        cluster.stop_controller()
        done = project.submit("--cluster", "slurm", expect=2)
        assert "Traceback" not in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: scontrol: ")
        assert "scontrol ping" in last
        assert [path.name for path in project.path.glob("runs/*")] == [".locks"]
        cluster.start_controller()
        assert queued_here(cluster, project) == []
        project.submit("--cluster", "slurm", "clusters.slurm.begin=now+1hour", "resources.nodes=1")
        assert len(queued_here(cluster, project)) == len(project.runs) == 1


def queued_here(cluster: Cluster, project: Project) -> list[str]:
    """Jobs submitted in this project's folder, those of no run that is left included."""
    lines = cluster.command("squeue", "--noheader", "--format=%i %Z").splitlines()
    return [line for line in lines if str(project.path) in line]


def test_a_file_that_is_made_while_the_job_waits_hides_no_module_from_it(project: Project, slurm: Cluster) -> None:
    project.submit("--cluster", "slurm", "clusters.slurm.hold=true", "params.steps=2")
    (run,) = project.runs
    for name in ("secrets", "types", "operator", "queue"):
        (project.path / f"{name}.py").write_text("raise RuntimeError('not the standard library')\n")
    slurm.command("scontrol", "release", status(run)["job_id"])
    wait_for("the end", lambda: status(run)["attempts"] and status(run)["attempts"][-1]["cause"], run)
    assert status(run)["state"] == "finished", describe(run)
