"""What a submission copies of the folder that it is typed in, on real repositories."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.repository import git, repository, write

from jobkit.errors import InputError
from jobkit.run import code_files, shared_code, snapshot
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor.attempt import NotRunnable, begin

PACKAGE = {"__init__.py": "", "model.py": "LAYERS = 2\n"}
EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]


def found(source: Path, *needed: str) -> set[str]:
    return {str(name) for name in code_files.find(source, source / "runs", map(Path, needed)).sizes}


def found_paths(source: Path) -> list[Path]:
    return list(code_files.find(source, source / "runs").sizes)


def remarks(source: Path) -> str:
    return "\n".join(code_files.find(source, source / "runs").remarks)


def copied(source: Path, folder: Path, *needed: str) -> Path:
    """The snapshot of a project."""
    files = snapshot.scan(source, code_files.find(source, source / "runs", map(Path, needed)).sizes)
    return folder / snapshot.take(source, files, folder)


def test_code_below_the_runs_directory_is_code_and_the_runs_beside_it_are_not(tmp_path: Path) -> None:
    source = tmp_path / "project"
    write(source, {"train.py": "", "kept/model.py": ""})
    run = RunDir(source / "toy-11111111")
    write(run.path, {"old.py": ""})
    run.write_config(Config(name="toy", task="mytask:train"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    assert {str(name) for name in code_files.find(source, tmp_path).sizes} == {"train.py", "kept/model.py"}


def test_a_folder_that_goes_while_code_is_looked_for_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"train.py": "", "results/part/old.py": ""})
    scandir = os.scandir

    def removed_then(folder: Path) -> object:
        if folder == tmp_path / "results":
            shutil.rmtree(folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", removed_then)
    assert found_paths(tmp_path) == [Path("train.py")]


# Repositories in repositories


def test_a_submodule_and_one_within_it_are_copied(tmp_path: Path) -> None:
    inner = repository(tmp_path / "inner", PACKAGE)
    outer = repository(tmp_path / "outer", PACKAGE)
    git(outer, "submodule", "add", "--quiet", str(inner), "inner")
    git(outer, "commit", "--quiet", "--message=inner")
    project = repository(tmp_path / "project", {"train.py": ""})
    git(project, "submodule", "add", "--quiet", str(outer), "libs/outer")
    git(project, "submodule", "update", "--init", "--recursive", "--quiet")
    code = copied(project, tmp_path / "code")
    assert (code / "libs/outer/inner/model.py").read_text() == PACKAGE["model.py"]
    assert {"train.py", "libs/outer/model.py", "libs/outer/inner/__init__.py"} <= found(project)
    assert not remarks(project)


def test_a_submodule_that_is_not_checked_out_is_named_with_what_to_do(tmp_path: Path) -> None:
    library = repository(tmp_path / "library", PACKAGE)
    project = repository(tmp_path / "project", {"train.py": ""})
    git(project, "submodule", "add", "--quiet", str(library), "library")
    git(project, "submodule", "deinit", "--force", "--quiet", "library")
    assert "git submodule update --init library" in remarks(project)


def test_a_nested_clone_is_copied_without_what_it_ignores(tmp_path: Path) -> None:
    project = repository(tmp_path / "project", {"train.py": ""})
    repository(project / "vendor/library", {**PACKAGE, ".gitignore": "out/\n"})
    write(project / "vendor/library", {"new.py": "", "out/made.py": ""})
    assert {"vendor/library/model.py", "vendor/library/new.py"} <= found(project)
    assert "vendor/library/out/made.py" not in found(project)


def test_another_working_tree_of_the_repository_in_a_hidden_folder_is_not_copied(tmp_path: Path) -> None:
    project = repository(tmp_path / "project", {"train.py": ""})
    git(project, "worktree", "add", "--quiet", ".trees/other")
    assert found(project) == {"train.py"}


def test_below_a_repository_the_folder_alone_is_copied(tmp_path: Path) -> None:
    repository(tmp_path, {"train.py": "", "project/train.py": "", "project/pkg/model.py": ""})
    assert found(tmp_path / "project") == {"train.py", "pkg/model.py"}


def test_what_the_repository_around_the_project_ignores_is_copied_if_it_looks_like_source(tmp_path: Path) -> None:
    repository(tmp_path, {".gitignore": "project/\n"})
    write(tmp_path / "project", {"train.py": "", "data.bin": ""})
    assert found(tmp_path / "project") == {"train.py"}


# Links


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("where", ["project/src/pkg", "shared/pkg"])
def test_a_linked_package_is_copied_as_files(tmp_path: Path, where: str, is_repository: bool) -> None:
    project = tmp_path / "project"
    write(tmp_path / where, PACKAGE)
    write(project, {"train.py": "", "one.py": "x = 1\n"})
    (project / "pkg").symlink_to(os.path.relpath(tmp_path / where, project))
    (project / "same.py").symlink_to("one.py")
    if is_repository:
        repository(project, {})
    code = copied(project, tmp_path / "code")
    assert (code / "pkg/model.py").read_text() == PACKAGE["model.py"]
    assert (code / "same.py").read_text() == "x = 1\n"
    assert not [path for path in code.rglob("*") if path.is_symlink()]


def test_links_that_lead_back_or_nowhere_are_passed_over(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, {"train.py": "", "pkg/model.py": ""})
    (project / "pkg/again").symlink_to("..")
    (project / "pkg/self").symlink_to("self")
    (project / "pkg/gone").symlink_to("nowhere")
    (project / "above").symlink_to("..")
    assert found(project) == {"train.py", "pkg/model.py"}
    repository(project, {})
    assert found(project) == {"train.py", "pkg/model.py"}


def test_two_folders_that_link_to_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, {"project/train.py": "", "a/a.py": "", "b/b.py": ""})
    (tmp_path / "a/b").symlink_to(tmp_path / "b")
    (tmp_path / "b/a").symlink_to(tmp_path / "a")
    (tmp_path / "project/a").symlink_to(tmp_path / "a")
    assert found(tmp_path / "project") == {"train.py", "a/a.py", "a/b/b.py"}


def test_a_linked_data_set_is_neither_copied_nor_a_reason_to_refuse(tmp_path: Path) -> None:
    write(tmp_path, {"project/train.py": ""})
    write(tmp_path / "data", {f"{number}.txt": "" for number in range(code_files.MAX_LINKED_FILES + 1)})
    (tmp_path / "project/data").symlink_to(tmp_path / "data")
    assert found(tmp_path / "project") == {"train.py"}
    assert not remarks(tmp_path / "project")


def test_a_linked_data_set_of_few_files_is_told_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "MUCH_BYTES", 1 << 20)
    write(tmp_path, {"project/train.py": "", **{f"data/{number}.json": "#" * (1 << 19) for number in range(3)}})
    (tmp_path / "project/data").symlink_to(tmp_path / "data")
    assert found(tmp_path / "project") == {"train.py"}


def test_a_linked_folder_with_too_much_code_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"project/train.py": ""})
    write(tmp_path / "code", {f"m{number}.py": "" for number in range(code_files.MAX_LINKED_FILES + 1)})
    (tmp_path / "project/all").symlink_to(tmp_path / "code")
    assert "all" in remarks(tmp_path / "project") and "link the package itself" in remarks(tmp_path / "project")


def test_runs_are_not_copied_by_whichever_way_they_are_reached(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(tmp_path, {"project/train.py": "", "scratch/runs/a/code/1/train.py": "", "scratch/notes.txt": ""})
    (project / "runs").symlink_to(tmp_path / "scratch/runs")
    (project / "scratch").symlink_to(tmp_path / "scratch")
    assert found(project) == {"train.py", "scratch/notes.txt"}


# What git ignores


@pytest.mark.parametrize("is_repository", [True, False])
def test_runs_in_another_runs_directory_are_not_copied(tmp_path: Path, is_repository: bool) -> None:
    files = {"train.py": "", "results/old/helper.py": "", "config.yaml": "", "events.jsonl": ""}
    project = tmp_path
    (repository if is_repository else write)(project, files)
    for name in ("results/toy-1", "sub/results/toy-2"):
        run = RunDir(project / name)
        write(run.path, {"code/c0de/train.py": "", "outputs/scores.json": "{}", "config.yaml": "", "events.jsonl": ""})
        write(run.path.parent, {".locks/toy.json": "", ".sweeps/toy/s1/points.json": "", ".code/c0de/train.py": ""})
    here = {"train.py", "results/old/helper.py", "config.yaml"} | ({"events.jsonl"} if is_repository else set())
    assert found(project) == here


def test_many_results_in_a_folder_without_code_are_told(tmp_path: Path) -> None:
    project = repository(tmp_path, {"train.py": "", "package/model.py": ""})
    for number in range(code_files.MANY_FILES + 1):
        write(project, {f"results/{number}/score.json": "{}", f"package/data/{number}.json": "{}"})
    said = remarks(project)
    assert f"results/ has no program, and {code_files.MANY_FILES + 1} file(s), 0 MiB" in said
    assert "package" not in said


def test_what_the_task_imports_is_copied_with_what_lies_beside_it_although_git_ignores_it(tmp_path: Path) -> None:
    project = repository(tmp_path / "project", {"train.py": "", "pkg/__init__.py": "", ".gitignore": "_*.py\nout/\n"})
    write(project, {"pkg/_version.py": "", "pkg/_later.py": "", "out/made.py": ""})
    git(project, "add", "--all", "--force", "pkg/__init__.py")
    assert {"pkg/_version.py", "pkg/_later.py", "pkg/__init__.py"} <= found(project, "pkg/_version.py")
    assert "out/made.py" not in found(project, "pkg/_version.py")


def test_modules_of_a_package_are_copied_although_git_ignores_them(tmp_path: Path) -> None:
    project = repository(tmp_path / "project", {"train.py": "", "pkg/a.py": "", ".gitignore": "_*.py\ngen\nout\n"})
    modules = ("_local.py", "pkg/_version.py", "pkg/gen/g.py", "pkg/gen/deep/h.py", f"pkg/gen/_fast{EXTENSION}")
    write(project, dict.fromkeys(modules, ""))
    others = ("out/made.py", "pkg/out/data.txt", "pkg/out/run-1/made.py", "pkg/out/env/pyvenv.cfg", "pkg/out/env/a.py")
    write(project, dict.fromkeys([*others, "pkg/gen/.cache/a.py", "pkg/gen/__pycache__/a.py"], ""))
    assert found(project) == {".gitignore", "train.py", "pkg/a.py", *modules}
    assert not remarks(project)


def test_a_data_set_in_a_package_is_not_copied_and_named_where_it_has_python_files(tmp_path: Path) -> None:
    project = repository(tmp_path / "project", {"pkg/a.py": "", ".gitignore": "images\nprograms\n"})
    for number in range(code_files.MAX_LINKED_FILES + 1):
        write(project / "pkg", {f"images/{number}.png": "", f"programs/p{number}.py": ""})
    assert found(project) == {".gitignore", "pkg/a.py"}
    assert remarks(project).startswith("pkg/programs has too much for code")


@pytest.mark.parametrize("is_repository", [True, False])
def test_an_extension_module_built_in_place_is_copied(tmp_path: Path, is_repository: bool) -> None:
    project = tmp_path / "project"
    write(project, {"pkg/model.py": "", ".gitignore": "*.so\n"})
    if is_repository:
        repository(project, {})
    write(project, {f"pkg/_fast{EXTENSION}": "", "data/other.so": ""})
    assert f"pkg/_fast{EXTENSION}" in found(project)


# Sizes


def test_big_data_that_is_tracked_is_named_and_a_big_program_is_copied(tmp_path: Path) -> None:
    big = "#" * (code_files.MAX_FILE_BYTES + 1)
    project = repository(tmp_path / "project", {"train.py": big, "run.sh": big, "vocabulary.json": big})
    assert found(project) == {"train.py", "run.sh"}
    (line,) = remarks(project).splitlines()
    assert "more than 2 MiB" in line and "vocabulary.json (2.0 MiB)" in line


def test_a_big_snapshot_is_told_with_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "MUCH_BYTES", 1 << 20)
    project = repository(tmp_path / "project", {"train.py": "", "a.bin": "#" * (1 << 20), "b.bin": "#" * (2 << 20)})
    (line,) = remarks(project).splitlines()
    assert "3 MiB in 3 file(s)" in line and line.index("b.bin (2.0 MiB)") < line.index("a.bin (1.0 MiB)")


def test_too_many_files_are_refused_with_the_folder_that_has_most(tmp_path: Path) -> None:
    write(tmp_path, {f"labels/{number}.txt": "" for number in range(code_files.MAX_FILES + 1)})
    with pytest.raises(InputError, match=f"{code_files.MAX_FILES + 1} in labels"):
        found(tmp_path)


# The copy


def test_a_program_can_be_executed_in_the_copy(tmp_path: Path) -> None:
    write(tmp_path / "project", {"go.sh": "", "plain.sh": ""})
    (tmp_path / "project/go.sh").chmod(0o755)
    code = copied(tmp_path / "project", tmp_path / "code")
    assert os.access(code / "go.sh", os.X_OK)
    assert not (code / "plain.sh").stat().st_mode & 0o111
    assert snapshot.verify(tmp_path / "code", code.name) == []
    (tmp_path / "project/plain.sh").chmod(0o755)
    assert copied(tmp_path / "project", tmp_path / "code") != code, "it is another version"


def test_a_copy_that_was_changed_is_not_verified(tmp_path: Path) -> None:
    write(tmp_path / "project", {"train.py": "", "model.py": ""})
    code = copied(tmp_path / "project", tmp_path / "code")
    (code / "train.py").write_text("x")
    (code / "model.py").unlink()
    assert len(snapshot.verify(tmp_path / "code", code.name)) == 2


def test_a_copy_that_was_changed_is_replaced_by_the_next_submission(tmp_path: Path) -> None:
    write(tmp_path / "project", {"train.py": "as submitted", "state.json": "{}"})
    code = copied(tmp_path / "project", tmp_path / "code")
    (code / "train.py").write_text("x")
    (code / "left.pyc").touch()
    assert copied(tmp_path / "project", tmp_path / "code") == code
    assert (code / "train.py").read_text() == "as submitted"
    assert [one.name for one in (tmp_path / "code").iterdir()] == [code.name], "nothing is left beside it"


def saving(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]) -> None:
    """Let somebody save files while they are copied: `before` each copy."""
    copy = shutil.copyfile

    def copyfile(source: Path, destination: Path) -> None:
        before(source)
        copy(source, destination)

    monkeypatch.setattr(shutil, "copyfile", copyfile)


def test_a_moved_run_of_a_sweep_gets_a_copy_of_its_own_and_nothing_untrue_is_told(tmp_path: Path) -> None:
    source = repository(tmp_path / "project", {"task.py": "A = 1\n"})
    code = snapshot.scan(source, found_paths(source))
    version = snapshot.take(source, code, shared_code.folder(tmp_path / "runs"))
    run = RunDir(tmp_path / "runs/digits-00000000")
    shared_code.use(run, version)
    assert snapshot.changes(run.code, version, code) == []
    moved = RunDir(run.path.rename(tmp_path / "digits-00000000"))
    with pytest.raises(InputError, match=r"\.code/\w+ is gone, .* as after a run of a sweep was moved out of its"):
        snapshot.changes(moved.code, version, code)
    assert snapshot.take(source, code, moved.code) == version
    assert [path.name for path in moved.code.iterdir()] == [version] and not snapshot.verify(moved.code, version)


@pytest.mark.parametrize("kind", ["moved", "copied"])
def test_a_whole_runs_directory_may_be_moved_or_copied(tmp_path: Path, kind: str) -> None:
    source = repository(tmp_path / "project", {"task.py": "A = 1\n"})
    version = snapshot.take(source, snapshot.scan(source, found_paths(source)), shared_code.folder(tmp_path / "runs"))
    shared_code.use(RunDir(tmp_path / "runs/digits-00000000"), version)
    shutil.copytree(tmp_path / "runs", tmp_path / "elsewhere/runs2", symlinks=True)
    if kind == "moved":
        shutil.rmtree(tmp_path / "runs")
    run = RunDir(tmp_path / "elsewhere/runs2/digits-00000000")
    assert not snapshot.verify(run.code, version) and shared_code.used_by(run) == [version]


def test_what_is_saved_while_it_is_copied_is_copied_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "project", {"train.py": "old", "gone.py": "", "other.py": ""})

    def save(file: Path) -> None:
        (tmp_path / "project/train.py").write_text("new")
        (tmp_path / "project/gone.py").unlink(missing_ok=True)

    saving(monkeypatch, save)
    code = copied(tmp_path / "project", tmp_path / "code")
    assert (code / "train.py").read_text() == "new" and not (code / "gone.py").exists()
    assert snapshot.verify(tmp_path / "code", code.name) == []
    monkeypatch.undo()
    assert copied(tmp_path / "project", tmp_path / "code") == code, "its name says what is in it"


def test_code_that_never_rests_is_refused_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "project", {"train.py": "", "log.txt": ""})
    saving(monkeypatch, lambda file: (tmp_path / "project/log.txt").open("a").write("line\n") and None)
    with pytest.raises(InputError, match=r"log\.txt; submit again when nothing writes to it"):
        copied(tmp_path / "project", tmp_path / "code")
    assert list((tmp_path / "code").iterdir()) == []


# What an attempt says of the copy


def a_run(tmp_path: Path) -> tuple[RunDir, Path]:
    """A run that was submitted, and its copy of a program and of a text."""
    repository(tmp_path / "project", {"train.py": "", "go": "", "state.json": "", ".gitignore": "runs\n"})
    (tmp_path / "project/go").chmod(0o755)
    run = RunDir(tmp_path / "project/runs/x")
    run.submitit.mkdir(parents=True)
    code = copied(tmp_path / "project", run.code)
    run.write_config(Config(name="x", command=["true"]))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local", code=code.name, cwd="/elsewhere", command="again")
    return run, code


@pytest.mark.parametrize("program", ["train.py", "go"])
def test_a_program_that_was_changed_is_not_run_and_status_says_what_to_type(tmp_path: Path, program: str) -> None:
    run, code = a_run(tmp_path)
    (code / program).write_text("x")
    with pytest.raises(NotRunnable, match=f"{program}: not as it was submitted; submit the run again"):
        begin(run, job_id="7", scheduler="local")
    status = run.status()
    assert (status.state, status.attempts) == (State.INTERRUPTED, [])
    assert status.error is not None and f"{program}: not as it was submitted" in status.error


def test_another_file_that_was_changed_is_told_and_the_attempt_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, code = a_run(tmp_path)
    (code / "state.json").write_text("x")
    begun = begin(run, job_id="7", scheduler="local")
    assert begun.environment["JOBKIT_SOURCE"] == "/elsewhere"
    assert "state.json: not as it was submitted" in caplog.text


def test_a_copy_may_be_read_by_nobody_who_may_not_read_the_file(tmp_path: Path) -> None:
    write(tmp_path / "project", {"toy.yaml": "hf_token: x", "go": "", "mytask.py": ""})
    (tmp_path / "project/toy.yaml").chmod(0o600)
    (tmp_path / "project/go").chmod(0o700)
    files = snapshot.scan(tmp_path / "project", map(Path, ("toy.yaml", "go", "mytask.py")))
    copy = tmp_path / "code" / snapshot.take(tmp_path / "project", files, tmp_path / "code")
    modes = {name: (copy / name).stat().st_mode & 0o777 for name in files}
    assert (modes["toy.yaml"], modes["go"]) == (0o600, 0o700) and modes["mytask.py"] & 0o044
