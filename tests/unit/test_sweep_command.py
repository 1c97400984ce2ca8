"""What a sweep's options refuse, and what --dry-run shows: nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import in_process
from harness.project import Project

from jobkit.run.command_line import to_type


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "params.lrr=1,2"], "params.lrr"),
        (["--sweep", "seed=a,b"], "seed: found 'a'"),
        (["--sweep", "seed"], "--sweep seed: expected key=v1,v2"),
        (["--sweep", "seed=1", "--no-sweep"], "--no-sweep: "),
        (["--sweep", "seed=1", "--max-running", "0"], "--max-running: found 0, expected 1 or more"),
        (["--sweep", "seed=1", "--fresh"], "--fresh is for one run"),
        (["--sweep", "seed=1", "--follow"], "--follow is for one run"),
        (["--sweep-file", "none.csv"], "none.csv: no such file"),
        (["--max-running", "3"], "--max-running is for a sweep"),
        (["--prune"], "--prune is for a sweep"),
        (
            ["params.sleep=3", "--sweep", "params.sleep=1,2"],
            "params.sleep=3: the sweep has values of its own for params.s",
        ),
        (["params.sleep=1,2"], "a run for each: --sweep params.sleep=1,2"),
        (["-m", "params.sleep=1,2"], "did you mean '--sweep'?"),
        (["--first"], "--first is for a sweep"),
        (["--sweep", "task=mytask:other"], "defines no 'other'"),
        (["--sweep", "params.sleep=0,${nothing}"], "there is no such key"),
    ],
)
def test_a_slip_is_one_line_and_nothing_is_started(project: Project, arguments: list[str], said: str) -> None:
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", *arguments, expect=2)
    assert said in done.stderr and done.stderr.count("\n") <= 2, done.stderr
    assert not project.runs and not (project.path / "runs" / ".sweeps").exists()


def test_a_yaml_s_slip_names_its_line(project: Project) -> None:
    yaml = project.path / "toy.yaml"
    yaml.write_text(yaml.read_text() + "sweep: {seed: 3}\n")
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", expect=2)
    assert "toy.yaml:6: sweep.seed: found 3, expected a list of values" in done.stderr


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("{params.lr: [1, 2]}", "toy.yaml:6: sweep: params.lr: there is no such key"),
        ("{params.sleep: [1, 2x]}", "toy.yaml:6: sweep: params.sleep: found the text '2x'"),
        ("\n- {seed: 1}\n- {resources.nodes: 1,\n   seed: two}", "toy.yaml:9: sweep.1: seed: found 'two'"),
        ("\n- {params sleep: 1}", "toy.yaml:7: sweep.0: 'params sleep=1': expected key=value"),
        ("{resources.nodes: [1, 0]}", "toy.yaml:6: sweep: resources.nodes: found 0"),
    ],
)
def test_a_slip_in_a_yaml_s_sweep_is_told_where_it_is(project: Project, sweep: str, said: str) -> None:
    yaml = project.path / "toy.yaml"
    yaml.write_text(yaml.read_text() + f"sweep: {sweep}\n")
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", expect=2)
    assert f"error: {said}" in done.stderr and done.stderr.count("\n") <= 2, done.stderr


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("seed,params.sleep\n1,1\n\n2,1s\n", "points.csv:4: column 2: params.sleep: found the text '1s'"),
        ("seed,params.slep\n1,\n2,1\n", "points.csv:3: column 2: params.slep: there is no such key; did you mean"),
        ("seed\n1\n[2\n", "points.csv:3: column 1: 'seed=[2': the value is not valid YAML"),
    ],
)
def test_a_slip_in_a_table_is_told_where_it_is(project: Project, table: str, said: str) -> None:
    (project.path / "points.csv").write_text(table)
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", "--sweep-file", "points.csv", expect=2)
    assert f"error: {said}" in done.stderr and done.stderr.count("\n") <= 2, done.stderr


PIPELINE = "pipeline: {train: {seed: 1}, test: {seed: 2}}\n"
LOCAL, SLURM = ["--local"], ["--cluster", "slurm"]


@pytest.mark.parametrize(
    ("extra", "arguments", "said"),
    [
        ("", [*LOCAL, "--first"], "--first is for a sweep"),
        ("", [*SLURM, "--prune"], "--prune is for a sweep"),
        ("", [*LOCAL, "--max-running", "0"], "--max-running is for a sweep"),
        ("", [*LOCAL, "--stage", "train"], "--stage train: toy.yaml has no `pipeline:`"),
        ("", [*LOCAL, "--weights-only"], "give --from RUN[@STEP] too"),
        ("", [*LOCAL, "--sweep", "seed=1", "--weights-only"], "give --from RUN[@STEP] too"),
        ("", [*LOCAL, "--from", ""], "no run ''"),
        ("", [*LOCAL, "--after", ""], "no run ''"),
        ("", [*LOCAL, "--after", "toy"], "toy"),
        ("", [*LOCAL, "--sweep", "seed=1", "--after", "toy"], "toy"),
        ("", [*LOCAL, "--json", "--dry-run"], "--json: "),
        ("", [*LOCAL, "--json", "--follow"], "--json: "),
        ("", [*LOCAL, "--detach", "--follow"], "--detach and --follow"),
        ("", [*LOCAL, "--priority", "5000000"], "--priority: found 5000000"),
        ("", [*LOCAL, "--sweep", "seed=1", "--priority", "5000000"], "--priority: found 5000000"),
        ("", [*SLURM, "--queue"], "--queue: this is of the queue of this machine"),
        ("", [*SLURM, "--priority", "1"], "--priority 1: this is of the queue of this machine"),
        ("", [*SLURM, "--sweep", "seed=1", "--queue"], "--queue: this is of the queue of this machine"),
        ("", [*SLURM, "--sweep", "seed=1", "--priority", "1"], "--priority 1: this is of the queue of this machine"),
        ("", [*LOCAL, *SLURM], "not allowed with argument --local"),
        (PIPELINE, [*SLURM, "--queue"], "--queue: this is of the queue of this machine"),
        (PIPELINE, [*LOCAL, "--sweep", "seed=1,2"], "--sweep is for a sweep, and this is a pipeline"),
        (PIPELINE, [*LOCAL, "--sweep-file", "x.csv"], "--sweep-file is for a sweep, and this is a pipeline"),
        (PIPELINE, [*LOCAL, "--first"], "--first is for a sweep, and this is a pipeline"),
        (PIPELINE, [*LOCAL, "--prune"], "--prune is for a sweep, and this is a pipeline"),
        (PIPELINE, [*LOCAL, "--max-running", "0"], "--max-running is for a sweep, and this is a pipeline"),
        (PIPELINE, [*LOCAL, "--from", "toy"], "--from is for one run, not for a pipeline"),
        (PIPELINE, [*LOCAL, "--weights-only"], "--weights-only is for one run, not for a pipeline"),
        (PIPELINE, [*LOCAL, "--follow"], "--follow is for one run, not for a pipeline"),
        (PIPELINE, [*LOCAL, "--stage", "tset"], "--stage tset: no such stage; did you mean 'test'?"),
        (PIPELINE, [*LOCAL, "--check-model"], "--check-model is for one run"),
        (PIPELINE + "sweep: {seed: [1, 2]}\n", LOCAL, "toy.yaml:7: sweep: there is a pipeline as well"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    project: Project, extra: str, arguments: list[str], said: str
) -> None:
    project.env["SLURM_CONF"] = "/nonexistent"
    yaml = project.path / "toy.yaml"
    yaml.write_text(yaml.read_text() + extra)
    done = in_process.jobkit(project, "submit", "toy.yaml", *arguments, expect=2)
    assert said in done.stderr and done.stderr.count("\n") <= 2 and done.stdout == "", done
    assert not project.runs and not (project.path / "runs" / ".sweeps").exists()


def test_a_dry_run_shows_each_run_and_what_is_one(project: Project) -> None:
    done = in_process.jobkit(
        project, "submit", "toy.yaml", "--local", "--dry-run", "--sweep", "params.sleep=0,0.0,1", "seed=0,1"
    )
    *lines, total = done.stdout.splitlines()
    assert total == "4 run(s); 2 of 6 points are one run with another"
    assert all(line.startswith("toy-") and "seed=" in line for line in lines)
    assert not (project.path / "runs").exists()


def test_what_to_type_next_has_the_runs_directory_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/env/jobkit/__main__.py", "submit", "toy.yaml", "--runs-dir", "other"])
    assert to_type("list", "toy/s1").endswith("jobkit list toy/s1 --runs-dir other")
    assert to_type("submit", "toy.yaml").endswith("jobkit.submit toy.yaml")
    monkeypatch.setattr("sys.argv", ["train.py", "--runs-dir", "of the program's own"])
    assert to_type("list").endswith("jobkit list")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("JOBKIT_CPU_SLOTS", "many", "JOBKIT_CPU_SLOTS: found 'many', allowed: 1 to 4096 slots"),
        ("JOBKIT_DEVICES_DIR", "/proc/none", "/proc/none: No such file or directory; set JOBKIT_DEVICES_DIR"),
    ],
)
def test_a_machine_that_cannot_be_used_is_told_before_a_thousand_runs_are_made(
    project: Project, variable: str, value: str, said: str
) -> None:
    project.env[variable] = value
    done = in_process.jobkit(project, "submit", "toy.yaml", "--local", "--sweep", "seed=0,1", expect=2)
    assert said in done.stderr and not project.runs
