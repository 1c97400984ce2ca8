"""Bad input is refused at submission: exit code 2, a line or two that say what is wrong, and nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness.in_process import Done, jobkit
from harness.project import Project

from jobkit.cli.main import VERBS
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir


@dataclass(frozen=True)
class Mistake:
    """What a person did wrong, and what must be said of it."""

    name: str
    said: list[str]
    arguments: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Written into the project first."""
    yaml: str = "toy.yaml"
    marks: pytest.MarkDecorator | tuple[()] = ()


TRAIN = "def train(ctx): pass\n"
SHORT = "name: toy\ntask: mytask:train\n"
LR = {"toy.yaml": f"{SHORT}params: {{lr: 1e-3}}\n"}

MISTAKES = [
    # The YAML
    Mistake("a file that is not there", ["missing.yaml: no such file"], yaml="missing.yaml"),
    Mistake("a YAML without its ending", ["toy: no such file; did you mean 'toy.yaml'?"], yaml="toy"),
    Mistake("an override before the YAML", ["the YAML comes first"], ["toy.yaml"], yaml="seed=1"),
    Mistake("a folder", ["/: cannot be read"], yaml="/"),
    Mistake("a list", ["toy.yaml", "found list"], files={"toy.yaml": "- name: toy\n"}),
    Mistake("an empty file", ["toy.yaml: the file is empty"], files={"toy.yaml": "# to do\n"}),
    Mistake(
        "a word that YAML takes for another",
        ["toy.yaml:1: name: found False, expected a text; put it in quotes"],
        files={"toy.yaml": SHORT.replace("toy", "off", 1)},
    ),
    Mistake("no YAML", ["toy.yaml:2: not valid YAML"], files={"toy.yaml": "name: [toy\n"}),
    Mistake(
        "an unknown key",
        ["toy.yaml:3: recources", "did you mean 'resources'?", "allowed: name, task"],
        files={"toy.yaml": SHORT + "recources: {nodes: 2}\n"},
    ),
    Mistake(
        "a wrong type",
        ["toy.yaml:3: resources.nodes: found True", "a whole number"],
        files={"toy.yaml": SHORT + "resources: {nodes: yes}\n"},
    ),
    Mistake("a bad time", ["resources.time: found 'soon'", "1:30:00"], ["resources.time=soon"]),
    Mistake("a negative count", ["resources.nodes: found -1", "1 or more"], ["resources.nodes=-1"]),
    Mistake(
        "a negative count of GPUs", ["resources.gpus_per_task: found -1", "0 or more"], ["resources.gpus_per_task=-1"]
    ),
    Mistake("an unknown precision", ["precision: found 'fp8'", "fp32, bf16"], ["precision=fp8"]),
    Mistake("no such determinism", ["deterministic: found 'always'", "true, false or warn"], ["deterministic=always"]),
    Mistake(
        "an unset variable", ["params.data", "JOBKIT_TEST_NOT_SET"], ["+params.data=${oc.env:JOBKIT_TEST_NOT_SET}"]
    ),
    Mistake(
        "an unset variable in the file",
        ["toy.yaml:3: params.data: ", "'JOBKIT_TEST_NOT_SET' not found", "type first: export JOBKIT_TEST_NOT_SET=..."],
        files={"toy.yaml": SHORT + "params: {data: '${oc.env:JOBKIT_TEST_NOT_SET}'}\n"},
    ),
    Mistake(
        "an unset variable in a list of the file",
        ["toy.yaml:4: inputs[1]: ", "export JOBKIT_TEST_NOT_SET=..."],
        files={"toy.yaml": SHORT + "inputs: [/,\n  '${oc.env:JOBKIT_TEST_NOT_SET}']\n"},
    ),
    Mistake("torch's device by another name", ["device: found 'gpu'", "did you mean 'cuda'?"], ["device=gpu"]),
    Mistake("FSDP by its own name", ["parallel: found 'fsdp'", "did you mean 'zero3'?"], ["parallel=fsdp"]),
    Mistake("FSDP in a mapping", ["found 'HYBRID_SHARD'", "did you mean 'hsdp'?"], ["parallel.data=HYBRID_SHARD"]),
    Mistake("Lightning's precision", ["found 'bf16-mixed'", "did you mean 'bf16'?"], ["precision=bf16-mixed"]),
    Mistake(
        "a script that is in the folder of the YAML",
        ["command: train.py: no such file in ", "it is in ", "/mine: type the command there"],
        files={"mine/toy.yaml": "name: toy\ncommand: [python, train.py]\n", "mine/train.py": ""},
        yaml="mine/toy.yaml",
    ),
    Mistake(
        "a pattern for a script",
        ["command: tr**.py: no such file in "],
        files={"mine.yaml": 'name: toy\ncommand: [python, "tr**.py"]\n'},
        yaml="mine.yaml",
    ),
    Mistake("an option of Slurm's", ["did you mean 'clusters.slurm.partition'?"], ["partition=low"]),
    Mistake("an option of Slurm's as one", ["is set without dashes: clusters.slurm.qos=low"], ["--qos", "low"]),
    *(
        Mistake(
            f"{key.partition(':')[0]} in the file",
            ["toy.yaml:3: ", meant, "(allowed: "],
            files={"toy.yaml": f"{SHORT}{key}\n"},
        )
        for key, meant in {
            "account: me": "did you mean 'clusters.slurm.account'?",
            "zero_optimization: {stage: 2}": "parallel: zero2, and docs/coming-from.md has the rest",
            "epochs: 5": "did you mean 'params.epochs'?",
            "checkpoint: {interval: 10}": "did you mean 'checkpoint.every'?",
        }.items()
    ),
    Mistake(
        "offload alone",
        ["found ddp; type 'parallel={data: zero2, offload: true}'"],
        ["parallel.offload=true", "resources.tasks_per_node=2", "--local"],
    ),
    Mistake("a value within itself", ["toy.yaml:1", "recursive"], files={"toy.yaml": "a: &a [*a]\n"}),
    Mistake(
        "hundreds of lists within each other",
        ["toy.yaml:3: not valid YAML: more than 40 values within each other"],
        files={"toy.yaml": f"{SHORT}params: {'[' * 600}{']' * 600}\n"},
    ),
    Mistake(
        "a number without end", ["toy.yaml", "digits"], files={"toy.yaml": f"{SHORT}params: {{a: 0x{'f' * 6000}}}\n"}
    ),
    # Overrides and options
    Mistake("an override without a value", ["'fast'", "key=value"], ["fast"]),
    Mistake("Hydra's way to take out", ["nothing is taken out; for no value: params.lr=null"], ["~params.lr"], LR),
    Mistake("Hydra's force", ["one + sets a value", "or not: +params.lr=1"], ["++params.lr=1"], LR),
    Mistake("a plus without a value", ["expected key=value in one word: +params.x=..."], ["+params.x"]),
    Mistake("an option of a CLI's", ["is set without dashes: params.lr=0.1"], ["--params.lr", "0.1"], LR),
    Mistake("an option of argparse", ["is set without dashes: params.lr=0.1"], ["--lr=0.1"], LR),
    Mistake("an option of Lightning's", ["is set without dashes: params.lr=-1"], ["--model.lr", "-1"], LR),
    Mistake("an option of Hugging Face's", ["is set without dashes: params.lr=3"], ["--learning-rate", "3"], LR),
    *(
        Mistake(f"{option} of another program", [meant], option.split())
        for option, meant in {
            "--gpus 2": "is set without dashes: resources.tasks_per_node=2",
            "--nproc-per-node=2": "is set without dashes: resources.tasks_per_node=2",
            "--trainer.devices 2": "is set without dashes: resources.tasks_per_node=2",
            "--num_machines 2": "is set without dashes: resources.nodes=2",
            "-N2": "is set without dashes: resources.nodes=2",
            "-t 10": "is set without dashes: resources.time=10",
            "-p low": "is set without dashes: clusters.slurm.partition=low",
            "--job-name mine": "is set without dashes: name=mine",
            "--ntasks 4": "the number of ranks is resources.nodes times resources.tasks_per_node",
            "--num_processes 4": "the number of ranks is resources.nodes times resources.tasks_per_node",
            "--rdzv_backend c10d": "jobkit starts the ranks and sets it; docs/launchers.md",
            "--resume": "the same command continues a run",
            "--array 1-3": "--sweep key=v1,v2",
            "--dependency afterok:3": "--after RUN",
            "--output_dir out": "in --runs-dir DIR",
            "--bf16": "here it is precision: bf16",
        }.items()
    ),
    Mistake("Slurm's tasks in the file", ["times resources.tasks_per_node"], files={"toy.yaml": f"{SHORT}ntasks: 2\n"}),
    Mistake("an option that is a key", ["is set without dashes: seed=3"], ["--seed", "3"]),
    Mistake("a key and a value", ["'params.lr': expected key=value in one word: params.lr=0.1"], ["params.lr", "0.1"]),
    Mistake("YAML's colon", ["'params.lr:': expected key=value in one word: params.lr=0.1"], ["params.lr:", "0.1"]),
    Mistake("a slash", ["'params/lr=1': expected key=value in one word: params.lr=1"], ["params/lr=1"]),
    Mistake("a colon and a value", ["expected key=value in one word: params.lr=1"], ["params:lr=1"]),
    Mistake("brackets", ["expected key=value in one word: params.lr=1"], ["params[lr]=1"]),
    Mistake("three words", ["'lr': expected key=value in one word: params.lr=0.1"], ["lr", "=", "0.1"], LR),
    Mistake("a blank behind the sign", ["in one word: params.lr=0.1"], ["params.lr=", "0.1"]),
    Mistake("nothing behind the sign", ["'params.lr=': expected key=value"], ["params.lr="]),
    Mistake("a slip in an option", ["did you mean '--local'?"], ["--locl"]),
    Mistake("an option that is cut off", ["--loca", "did you mean '--local'?"], ["--loca"]),
    Mistake(
        "a slip in a stage",
        ["trian.seed=1: there is no such stage; did you mean 'train'?"],
        ["trian.seed=1"],
        {"toy.yaml": SHORT + "pipeline: {train: {seed: 2}}\n"},
    ),
    Mistake("a pipeline of nothing", ["toy.yaml:3: pipeline: found 3"], [], {"toy.yaml": SHORT + "pipeline: 3\n"}),
    Mistake("an override that is no YAML", ["params.a=[1", "not valid YAML"], ["params.a=[1"]),
    Mistake("an override of nothing", ["command line: nodes", "allowed: name"], ["nodes=2"]),
    Mistake("a demo that is not there", ["--demo"], ["--demo"]),
    Mistake("a check that is part of a dry run", ["--check-model starts nothing", "--dry-run"], ["--check-model"]),
    Mistake(
        "a check of a command",
        ["toy.yaml:2: command: --check-model is for a `task`"],
        ["--dry-run", "--check-model"],
        {"toy.yaml": "name: toy\ncommand: [python, -c, pass]\n"},
    ),
    # The task
    Mistake("no task", ["task: missing"], files={"toy.yaml": "name: toy\n"}),
    Mistake("a task of another form", ["task: found 'mytask'", "module:callable"], ["task=mytask"]),
    Mistake(
        "no such module",
        ["task", "no module 'mytsk'", "where the command was typed", "did you mean 'mytask'?"],
        ["task=mytsk:train"],
    ),
    Mistake("no such submodule", ["task", "pkg.sub"], ["task=pkg.sub:train"], {"pkg/__init__.py": ""}),
    Mistake("no such function", ["mytask.py", "no 'trian'", "did you mean 'train'?"], ["task=mytask:trian"]),
    Mistake(
        "a number for a task",
        ["toy.yaml:2: task: mytask:X: ", "mytask.py:2: X is a plain value there, not a function"],
        files={"mytask.py": f"{TRAIN}X = 3\n", "toy.yaml": SHORT.replace(":train", ":X")},
    ),
    Mistake("a syntax error", ["mytask.py:2", "not valid Python"], files={"mytask.py": f"{TRAIN}x = (\n"}),
    Mistake(
        "an import that is not installed",
        ["mytask.py:1", "import torchh", "no module 'torchh'"],
        files={"mytask.py": f"import torchh\n{TRAIN}"},
    ),
    Mistake(
        "a syntax error in a module of the user's own",
        ["pkg/sub.py:1", "not valid Python"],
        files={"mytask.py": f"import pkg.sub\n{TRAIN}", "pkg/__init__.py": "", "pkg/sub.py": "def ("},
    ),
    Mistake(
        "a missing import in a module of the user's own",
        ["pkg/sub.py:1", "no module 'torchh'"],
        files={"mytask.py": f"from pkg.sub import x\n{TRAIN}", "pkg/__init__.py": "", "pkg/sub.py": "import torchh"},
    ),
    Mistake(
        "a missing import in a module that comes by `from package import module`",
        ["pkg/sub.py:1", "no module 'torchh'"],
        ["--dry-run"],
        {"mytask.py": f"from pkg import sub\n{TRAIN}", "pkg/__init__.py": "", "pkg/sub.py": "import torchh"},
    ),
    Mistake(
        "a name that neither a package nor its folder has",
        ["mytask.py:1", "nosuch"],
        ["--dry-run"],
        {"mytask.py": f"from pkg import nosuch\n{TRAIN}", "pkg/__init__.py": ""},
    ),
    Mistake(
        "a missing import in the package above the task",
        ["pkg/__init__.py:1", "no module 'torchh'"],
        ["task=pkg.sub:train", "--dry-run"],
        {"pkg/__init__.py": "import torchh", "pkg/sub.py": TRAIN},
    ),
    Mistake(
        "a relative import in a module of no package",
        ["mytask.py:1", "import .other", "relative"],
        files={"mytask.py": f"from . import other\n{TRAIN}", "other.py": ""},
    ),
    Mistake("an input by ~", ["inputs", "~/: `~` is not expanded in the job: write /"], ["inputs=[~/]"]),
    Mistake("an input of nobody's", ["inputs", "~nosuchuser/x", "home"], ["inputs=[~nosuchuser/x]"]),
    Mistake("an input whose name is too long", ["inputs", "File name too long"], [f"inputs=[{'b' * 300}]"]),
    Mistake("a missing input", ["inputs", "/no/such/data"], ["inputs=[/no/such/data]"]),
    Mistake(
        "an unknown option of a cluster that is not used",
        ["clusters.h100.partion", "did you mean 'partition'?"],
        ["clusters.h100.partion=low"],
    ),
    Mistake(
        "an unknown scheduler of a cluster that is not used",
        ["clusters.h100.scheduler: found 'pbs'", "slurm, local"],
        ["clusters.h100.scheduler=pbs"],
    ),
    # Where
    Mistake("the folder of the code for runs", ["it is the folder of the code"], ["--runs-dir", ".", "--dry-run"]),
    Mistake("the same of a sweep", ["it is the folder of the code"], ["--runs-dir", "", "--sweep", "seed=1"]),
    Mistake("a runs directory below a file", ["toy.yaml/runs", "--runs-dir"], ["--runs-dir", "toy.yaml/runs"]),
    Mistake("a runs directory nobody can make", ["/proc/runs", "--runs-dir"], ["--runs-dir", "/proc/runs"]),
    Mistake(
        "a runs directory with a sign of Submitit's", ["run%j: %j", "--runs-dir"], ["--runs-dir", "run%j", "--dry-run"]
    ),
    Mistake(
        "a file where the run directory should be",
        ["runs", "--runs-dir"],
        ["params={}"],
        files={"toy.yaml": SHORT, "runs/toy-05e94d04": ""},
    ),
]

SLURM_MISTAKES = [
    Mistake("an unknown cluster", ["--cluster slrum", "did you mean 'slurm'?"], ["--cluster", "slrum"]),
    Mistake("a cluster of nobody's", ["--cluster mars", "known: slurm, local"], ["--cluster", "mars"]),
    Mistake(
        "an unknown option of sbatch",
        ["clusters.slurm.partion", "did you mean 'partition'?"],
        ["clusters.slurm.partion=low"],
    ),
    Mistake(
        "a runs directory with a sign of Slurm's",
        ["a\\b: \\ stands", "JOBKIT_RUNS"],
        ["--runs-dir", "a\\b", "--dry-run"],
    ),
    Mistake(
        "a runs directory with a pattern of Slurm's",
        ["run%4u: %4u", "JOBKIT_RUNS"],
        ["--runs-dir", "run%4u", "--dry-run"],
    ),
    Mistake("an option that jobkit sets", ["clusters.slurm.output", "jobkit logs"], ["clusters.slurm.output=x"]),
    Mistake("an unknown scheduler", ["clusters.slurm.scheduler", "slurm, local"], ["clusters.slurm.scheduler=pbs"]),
    Mistake(
        "setup that is no text",
        ["clusters.slurm.setup: found 5"],
        ["clusters.slurm.setup=5"],
    ),
    Mistake(
        "a delay of the signal that is no number of seconds",
        ["clusters.slurm.signal_delay_s: found '2min'", "seconds"],
        ["clusters.slurm.signal_delay_s=2min"],
    ),
]


def each(mistakes: list[Mistake]) -> list[object]:
    return [pytest.param(one, id=one.name, marks=one.marks) for one in mistakes]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    (tmp_path / "mytask.py").write_text(TRAIN)
    yield made


def assert_refused(project: Project, mistake: Mistake, *place: str) -> None:
    for name, text in mistake.files.items():
        (project.path / name).parent.mkdir(exist_ok=True, parents=True)
        (project.path / name).write_text(text)
    before = {path for path in project.path.glob("runs/*") if path.name != ".locks"}
    done = jobkit(project, "submit", mistake.yaml, *place, *mistake.arguments, expect=2)
    assert_said(done, mistake.said)
    assert {path for path in project.path.glob("runs/*") if path.name != ".locks"} == before


def assert_said(done: Done, said: list[str]) -> None:
    """One or two lines, the first beginning with `error:`, and all that must be in them."""
    assert done.returncode == 2, done
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 2, done.stderr
    assert lines[0].startswith("error:"), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for part in said:
        assert part in done.stderr


@pytest.mark.parametrize("mistake", each(MISTAKES))
def test_a_mistake_is_refused_on_this_machine(project: Project, mistake: Mistake) -> None:
    assert_refused(project, mistake, "--local")


@pytest.mark.parametrize("mistake", each(SLURM_MISTAKES))
def test_a_mistake_about_clusters_is_refused_before_slurm_is_asked(project: Project, mistake: Mistake) -> None:
    project.env["SLURM_CONF"] = "/nonexistent"
    assert_refused(project, mistake, *([] if "--cluster" in mistake.arguments else ["--cluster", "slurm"]))


def test_a_command_below_its_folder_says_where_it_is_to_be_typed(project: Project) -> None:
    run = RunDir(project.path / "runs" / "toy-11111111")
    run.path.mkdir(parents=True)
    run.write_config(Config(name="toy", task="mytask:train"))
    below = Project(project.path / "sub")
    (below.path / "mytask.py").unlink()
    said = jobkit(below, "submit", "../toy.yaml", "--local", expect=2).stderr
    assert f"it is in {project.path}: type the command there" in said
    there = f"there are some in {project.path}/runs: type the command in {project.path}"
    assert there in jobkit(below, "list").stdout
    assert there in jobkit(below, "status", "latest", expect=2).stderr


def test_more_gpus_than_there_are_are_refused_on_this_machine(project: Project) -> None:
    project.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    arguments = ["resources.gpus_per_task=1", "resources.tasks_per_node=3", "resources.nodes=1"]
    mistake = Mistake("GPUs", ["need 3", "CUDA_VISIBLE_DEVICES allows 2", "resources.gpus_per_task=0"], arguments)
    assert_refused(project, mistake, "--local")


def test_a_mistake_in_the_users_own_clusters_is_named_in_that_file(project: Project) -> None:
    own = project.path / "none.yaml"
    own.write_text("clusters:\n  h100: 5\n")
    assert_refused(project, Mistake("own", ["none.yaml:1: clusters"]), "--local")


def test_an_unknown_option_in_the_users_own_clusters_is_named_in_that_file(project: Project) -> None:
    (project.path / "none.yaml").write_text("clusters:\n  h100: {partion: h100}\n")
    mistake = Mistake("own", ["none.yaml:2: clusters.h100.partion", "did you mean 'partition'?"])
    assert_refused(project, mistake, "--cluster", "h100")


@pytest.mark.parametrize("key", ["task", "inputs"])
def test_a_task_or_input_that_is_not_there_is_named_with_its_line(project: Project, key: str) -> None:
    text = {"task": "task: nosuch:train\n", "inputs": "task: mytask:train\ninputs: [/no/such/data]\n"}[key]
    line = 2 if key == "task" else 3
    assert_refused(
        project, Mistake(key, [f"toy.yaml:{line}: {key}"], files={"toy.yaml": f"name: toy\n{text}"}), "--local"
    )


def test_a_runs_name_is_not_its_directory(project: Project) -> None:
    run = RunDir(project.path / "runs" / "imagenet64-0123abcd")
    run.path.mkdir(parents=True)
    run.write_config(Config(name="imagenet64", task="mytask:train"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    yaml = f'{SHORT}inputs: ["${{params.run}}/config.yaml"]\nparams:\n  run: ???\n'
    said = "'imagenet64' is a run's name: give its directory, runs/imagenet64-0123abcd"
    files = {"toy.yaml": yaml}
    mistake = Mistake("a name", ["imagenet64/config.yaml: no such", said], files=files)
    assert_refused(project, mistake, "params.run=imagenet64")
    several = ["params.run=runs/imagenet64-0123abcd", "runs/imagenet64-0123abcd"]
    said = "'runs/imagenet64-0123abcd' is a path, not key=value; params.run takes one path, and here there are several"
    assert_refused(project, Mistake("paths", [said]), *several)


def test_a_module_above_the_yaml_is_told_where_the_command_was_typed_elsewhere(project: Project) -> None:
    (project.path / "experiments").mkdir()
    (project.path / "experiments" / "train.py").write_text(TRAIN)
    (project.path / "elsewhere").mkdir()
    yaml = project.path / "experiments" / "toy.yaml"
    yaml.write_text("name: toy\ntask: experiments.train:train\n")
    words = [sys.executable, "-m", "jobkit.submit", str(yaml), "--local"]
    folder = project.path.parent
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"no module 'experiments.train' in {folder}" in done.stderr
    assert done.stderr.endswith(f"; it is in {project.path}: type the command there\n")


def test_an_input_that_is_not_there_is_told_before_the_devices_that_are_missing(project: Project) -> None:
    text = "name: toy\ntask: mytask:train\ninputs: [/no/such/data]\nresources: {tasks_per_node: 8, gpus_per_task: 1}\n"
    project.env["CUDA_VISIBLE_DEVICES"] = "0"
    for more in ((), ("--dry-run",)):
        mistake = Mistake("inputs", ["toy.yaml:3: inputs: /no/such/data: no such file"], files={"toy.yaml": text})
        assert_refused(project, mistake, "--local", *more)


def without_slurm(tmp_path: Path) -> str:
    """A PATH with what jobkit may need and no Slurm."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("git", "sh", "env"):
        if found := shutil.which(program):
            (programs / program).symlink_to(found)
    return str(programs)


def test_where_there_is_no_sbatch_slurm_is_refused(project: Project, tmp_path: Path) -> None:
    project.env["PATH"] = without_slurm(tmp_path)
    assert_refused(project, Mistake("sbatch", ["sbatch is not on PATH", "--local"]), "--cluster", "slurm")
    assert jobkit(project, "submit", "toy.yaml", "--dry-run", "--cluster", "slurm").returncode == 0
    assert "(local)" in jobkit(project, "submit", "toy.yaml", "--dry-run").stdout


def test_a_dry_run_leaves_nothing_behind_and_refuses_the_same(project: Project) -> None:
    for place in (["--local"], ["--cluster", "slurm"]):
        done = jobkit(project, "submit", "toy.yaml", "--dry-run", *place)
        assert (done.returncode, done.stderr) == (0, "")
        assert "name: toy" in done.stdout
        assert_said(
            jobkit(project, "submit", "toy.yaml", "--dry-run", *place, "task=mytsk:train", expect=2),
            ["did you mean 'mytask'?"],
        )
    assert not (project.path / "runs").exists()


def test_a_percent_sign_that_means_nothing_is_part_of_a_path(project: Project) -> None:
    for place, folder in ((["--local"], "50% of 100%d"), (["--cluster", "slurm"], "50% of 5%_x")):
        done = jobkit(project, "submit", "toy.yaml", "--dry-run", *place, "--runs-dir", folder)
        assert f"{folder}/toy-" in done.stdout


def test_an_option_of_slurms_is_set_in_the_entry_of_the_cluster_that_is_asked_for(project: Project) -> None:
    done = jobkit(project, "submit", "toy.yaml", "--cluster", "h100", "--mem", "4G", expect=2)
    assert_said(done, ["unrecognized arguments: --mem; a value is set without dashes: clusters.h100.mem=4G"])


def test_local_and_cluster_together_are_refused(project: Project) -> None:
    done = jobkit(project, "submit", "toy.yaml", "--local", "--cluster", "slurm", expect=2)
    assert "not allowed with" in done.stderr


# The other verbs


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)], ids=lambda arguments: " ".join(arguments))
def test_help_is_given(project: Project, arguments: list[str]) -> None:
    printed = jobkit(project, *arguments, "--help").stdout
    assert printed.startswith("usage: ")
    assert all(verb in printed for verb in (VERBS if not arguments else []))


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("submit", "list", "board", "doctor", "queue", "completion")]
)
def test_a_verb_refuses_an_unknown_run_in_one_line(project: Project, verb: str) -> None:
    done = jobkit(project, verb, "nosuch", *{"diff": ["nosuch"], "rewind": ["--step", "1"]}.get(verb, []), expect=2)
    assert_said(done, ["nosuch", "--runs-dir"])
    assert len(done.stderr.splitlines()) == 1
    assert not (project.path / "runs").exists()


def test_a_verb_finds_a_run_by_a_beginning_that_is_its_own(project: Project) -> None:
    for name in ("toy-11111111", "toy-22222222"):
        run = project.path / "runs" / name
        run.mkdir(parents=True)
        shutil.copyfile(project.path / "toy.yaml", run / "config.yaml")
    assert jobkit(project, "status", "toy-2").stdout.startswith("toy-22222222: ")
    assert_said(jobkit(project, "status", "toy", expect=2), ["beginning of 2 runs", "toy-11111111", "toy-22222222"])
    assert_said(jobkit(project, "status", "toy-11111112", expect=2), ["did you mean 'toy-11111111'?"])


def test_a_name_is_that_of_its_newest_run_although_others_begin_with_it(project: Project) -> None:
    for name in ("toy-11111111", "toy-11111111-2", "toys-22222222"):
        run = project.path / "runs" / name
        run.mkdir(parents=True)
        shutil.copyfile(project.path / "toy.yaml", run / "config.yaml")
    assert jobkit(project, "status", "toy").stdout.startswith("toy-11111111-2: ")
    assert jobkit(project, "status", "toy-11111111").stdout.startswith("toy-11111111: ")


@pytest.mark.parametrize("arguments", [[], ["--bogus"], ["status"], ["submit"], ["submit", "toy.yaml", "--bogus"]])
def test_a_command_line_that_is_none_is_refused(project: Project, arguments: list[str]) -> None:
    done = jobkit(project, *arguments, expect=2)
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""


def test_an_option_that_is_misspelt_is_told_with_the_nearest_and_the_verb(project: Project) -> None:
    for verb, typed, meant in (
        ("submit", ["toy.yaml", "--folow"], "--follow"),
        ("logs", ["x", "--rnak", "3"], "--rank"),
        ("logs", ["x", "--ran", "3"], "--rank"),
        ("rm", ["x", "--dry"], "--dry-run"),
    ):
        said = jobkit(project, verb, *typed, expect=2).stderr
        assert f"did you mean {meant!r}?" in said and f"jobkit {verb} --help" in said


def test_usage_lines_have_the_command_as_it_was_typed(project: Project) -> None:
    for typed in (["jobkit", "submit"], ["python", "-m", "jobkit", "status"], ["python", "-m", "jobkit.submit"]):
        first = Path(sys.executable).parent / typed[0]
        done = subprocess.run([first, *typed[1:], "--help"], cwd=project.path, capture_output=True, text=True)
        assert done.stdout.startswith(f"usage: {' '.join(typed)} [-h] ")


def test_the_version_is_told(project: Project) -> None:
    assert jobkit(project, "--version").stdout.startswith("jobkit 0.")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["submit toy.yaml --local --dry-run", "list", "--version", "submit --help"])
def test_what_is_printed_and_cannot_be_is_told_in_a_line_at_most(project: Project, words: str, unbuffered: str) -> None:
    def errors(where: str) -> str:
        command = f"{sys.executable} -m jobkit {words} {where}"
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        return subprocess.run(
            command, shell=True, cwd=project.path, env=environment, stderr=subprocess.PIPE, text=True, check=False
        ).stderr

    assert errors("| true") in ("", "no runs in ./runs\n")
    assert "Traceback" not in errors(">&-")  # argparse has its help on standard error then
    assert len(errors("> /dev/full").splitlines()) <= 2


def test_a_result_that_nobody_reads_keeps_its_exit_code(project: Project) -> None:
    run = RunDir(project.path / "runs" / "toy-11111111")
    run.path.mkdir(parents=True)
    run.write_config(Config(name="toy", task="mytask:train"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.STARTED, attempt=1)
    run.record(Event.FAILED, attempt=1, cause="crashed", error="no")

    def code(verb: str, unbuffered: str) -> int:
        command = f"set -o pipefail; {sys.executable} -m jobkit {verb} toy | sleep 0"
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        return subprocess.run(["bash", "-c", command], cwd=project.path, env=environment, check=False).returncode

    assert code("wait", "") in (1, 141), "not 0, which a script would take for a run that is finished"
    assert code("status", "") == 0 and code("status", "1") in (0, 141)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls"], "no command 'ls'; did you mean 'list'? (there are: "),
        (["statsu"], "no command 'statsu'; did you mean 'status'? (there are: submit, list, "),
        (["toy.yaml", "--local"], "no command 'toy.yaml'; did you mean `python -m jobkit.submit toy.yaml`?"),
    ],
)
def test_an_unknown_command_names_the_nearest(project: Project, arguments: list[str], said: str) -> None:
    assert said in jobkit(project, *arguments, expect=2).stderr


def test_a_list_of_no_runs_is_no_mistake(project: Project) -> None:
    assert "no runs" in jobkit(project, "list").stdout
    assert jobkit(project, "list", "--json").stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["status", "a" * 300], ["cancel", "a" * 300], ["list", "--runs-dir", "a" * 300]])
def test_a_path_that_is_too_long_is_refused_in_one_line(project: Project, words: list[str]) -> None:
    done = jobkit(project, *words, expect=2)
    assert_said(done, ["File name too long"])
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_file_server_that_is_away_is_named_in_one_line(
    project: Project, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: str, **how: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "scandir", stat)
    done = jobkit(project, "list", expect=2)
    assert_said(done, [f"{project.path / 'runs'}: {os.strerror(number)}; repeat the command"])
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("entry_points", [None, "[submitit]\njob_environment = other:Environment\n"])
def test_a_jobkit_that_submitit_would_not_find_in_a_job_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, entry_points: str | None
) -> None:
    installed = project.path / "site/jobkit-0.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: jobkit\nVersion: 0.0.1\n")
    if entry_points is not None:
        (installed / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(installed.parent))
    done = jobkit(project, "submit", "toy.yaml", "--local", "--dry-run", expect=2)
    assert f"jobkit is not installed in {sys.executable}" in done.stderr
