"""The code snapshot: which files are code, stored once, of one user, whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from jobkit.errors import InputError
from jobkit.run import snapshot
from jobkit.run.snapshot import is_intact, take


def _write(folder: Path, *names: str, text: str = "x = 1\n") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _git(folder: Path, *words: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def _files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {snapshot.MANIFEST}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = _write(tmp_path / "project", "train.py", "data.csv", "lib/__init__.py", "lib/_version.py", "secret.txt")
    _write(folder, "lib/ops" + snapshot.MODULES[1], "ignored/x.py")
    (folder / ".gitignore").write_text("secret.txt\n_version.py\n*.so\nignored\n")
    _git(folder, "init", "-q")
    return folder


def test_git_says_what_is_code_and_built_modules_come_with_their_package(project: Path) -> None:
    built = {"lib/_version.py", "lib/ops" + snapshot.MODULES[1]}
    assert _files(take(project, project / "runs")) == {
        ".gitignore", "train.py", "data.csv", "lib/__init__.py", *built
    }  # fmt: skip


def test_without_git_source_files_are_code_and_environments_are_not(tmp_path: Path) -> None:
    folder = _write(tmp_path / "p", "train.py", "conf/a.yaml", "data.bin", ".hidden/x.py", "env/pyvenv.cfg", "env/x.py")
    _write(folder, "node_modules/x.py", "old/.locks/x", "old/toy-1/config.yaml", "old/toy-1/code/x.py")
    assert _files(take(folder, tmp_path / "runs")) == {"train.py", "conf/a.yaml"}


def test_runs_are_no_code_wherever_they_are(project: Path) -> None:
    _write(project, "runs/toy-1/config.yaml", "runs/x.py")
    _write(project, "old/.locks/x", "old/.code/abc/x.py", "old/toy-2/config.yaml")
    (project / "link").symlink_to(project / "runs")
    names = _files(take(project, project / "runs"))
    assert not any(name.startswith(("runs", "old", "link")) for name in names)


def test_a_folder_below_a_runs_directory_may_have_code(tmp_path: Path) -> None:
    folder = _write(tmp_path / "runs" / "toy-1", "config.yaml", "events.jsonl", "outputs/x.py") / "outputs"
    assert _files(take(folder, tmp_path / "runs")) == {"x.py"}
    with pytest.raises(InputError):
        take(tmp_path / "runs", tmp_path / "runs")


def test_submodules_and_nested_clones_are_code_and_other_working_trees_are_not(project: Path, tmp_path: Path) -> None:
    other = _write(tmp_path / "other", "sub.py", "no.txt")
    (other / ".gitignore").write_text("no.txt\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        _git(other, *words)
    _git(project, "submodule", "add", "-q", str(other), "module")
    _git(project, "clone", "-q", str(other), "clone")
    _git(project, "clone", "-q", str(other), ".trees/a")
    _write(project, "clone/no.txt")
    names = _files(take(project, project / "runs"))
    assert {"module/sub.py", "clone/sub.py"} <= names
    assert not names & {"clone/no.txt", ".trees/a/sub.py"}


def test_a_link_to_a_folder_stays_a_link(project: Path, tmp_path: Path) -> None:
    _write(tmp_path / "shared", "util.py")
    for name, target in (("shared", tmp_path / "shared"), ("up", tmp_path), ("no", "nil")):
        (project / name).symlink_to(target)
    taken = take(project, project / "runs")
    assert (taken / "shared").resolve() == tmp_path / "shared"
    assert not (taken / "no").exists() and is_intact(taken)
    shutil.rmtree(project / ".git")
    assert (take(project, project / "runs") / "shared" / "util.py").exists()


def test_big_data_is_named_and_too_many_files_are_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_FILE_BYTES", 100)
    _write(project, "big.csv", "big.py", text="# " + "x" * 200)
    warnings: list[str] = []
    monkeypatch.setattr(snapshot.log, "warning", lambda text, *values: warnings.append(text % values))
    taken = take(project, project / "runs")
    assert "big.csv" in warnings[0] and {"big.csv", "big.py"} & _files(taken) == {"big.py"}
    monkeypatch.setattr(snapshot, "MAX_FILES", 3)
    with pytest.raises(InputError) as refused:
        take(project, project / "runs")
    assert refused.value.file == project


@pytest.mark.parametrize("with_git", [True, False])
def test_what_the_yaml_excludes_stays_out_with_git_and_without(
    project: Path, with_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_git:
        shutil.rmtree(project / ".git")
        (project / "lib" / "_version.py").unlink()
    _write(project, "data/a.py", "data/deep/b.py", "notes/c.txt", "datax/d.py")
    monkeypatch.setattr(snapshot, "MAX_FILES", 8)
    _write(project, *(f"data/{number}.json" for number in range(8)))
    with pytest.raises(InputError, match=r"are data/.*exclude: \['data/'\]"):
        take(project, project / "runs")
    names = _files(take(project, project / "runs", ["data/", "*.txt", "lib/*.so"]))
    assert names - {".gitignore", "data.csv"} == {"train.py", "lib/__init__.py", "datax/d.py"} | (
        {"lib/_version.py"} if with_git else {"ignored/x.py"}
    )


@pytest.mark.parametrize("with_git", [True, False])
def test_what_the_user_may_not_read_is_named_and_left_out(
    with_git: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As another user than root, who may read everything."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = _write(Path(name) / "p", "train.py", "closed.py", "shut/x.py", "hidden/__init__.py", "dark/y.py")
        _write(folder, "runs/.locks/x")
        os.mkfifo(folder / "pipe.py")
        (folder / "tube").symlink_to("/dev/null")
        (folder / "gone.py").symlink_to("nil")
        if with_git:
            _git(folder, "init", "-q")
            _git(folder, "add", "train.py", "closed.py", "shut/x.py", "hidden/__init__.py", "dark/y.py")
        if os.geteuid() == 0:
            for path in (folder.parent, *folder.parent.rglob("*")):
                os.chown(path, 54321, 54321, follow_symlinks=False)
        for closed, mode in (("closed.py", 0), ("shut", 0), ("hidden", 0o300), ("dark", 0o600)):
            (folder / closed).chmod(mode)
        warnings: list[str] = []
        monkeypatch.setattr(snapshot.log, "warning", lambda text, *values: warnings.append(text % values))
        monkeypatch.setenv("HOME", str(folder))
        excluded = ["shut", "dark"] if with_git else ["shut"]
        before = os.geteuid()
        os.seteuid(54321 if before == 0 else before)
        try:
            names = _files(take(folder, folder / "runs", excluded))
        finally:
            os.seteuid(before)
            for closed in ("shut", "hidden", "dark"):
                (folder / closed).chmod(0o700)
        assert names == {"train.py", *(["hidden/__init__.py"] if with_git else [])}
        (line,) = warnings
        assert "closed.py" in line and "hidden" in line and "chmod" in line and "code: {exclude:" in line
        assert ("dark" in line) is not with_git and "shut" not in line


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_a_git_that_refuses_is_said_and_nothing_is_copied(project: Path) -> None:
    for path in (project, project / ".git"):
        os.chown(path, 54321, -1)
    with pytest.raises(InputError) as refused:
        take(project, project / "runs")
    assert refused.value.file == project and "safe.directory" in refused.value.hint
    assert not (project / "runs").exists()


def test_equal_code_is_stored_once_and_a_damaged_copy_replaced(project: Path) -> None:
    runs = project / "runs"
    first = take(project, runs)
    assert take(project, runs) == first
    (first / "train.py").write_text("damaged")
    assert not is_intact(first)
    assert take(project, runs) == first and is_intact(first)
    (project / "data.csv").unlink()
    second = take(project, runs)
    assert {path.name for path in (runs / ".code").iterdir()} == {first.name, second.name}


def test_a_copy_is_as_secret_as_its_file_and_nobody_else_writes_in_it(project: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    (project / "train.py").chmod(0o755)
    (project / "data.csv").chmod(0o600)
    old = os.umask(0o002)
    try:
        taken = take(project, shared)
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in taken.iterdir()}
    assert (modes["train.py"], modes["data.csv"]) == (0o755, 0o600)
    assert not any(mode & 0o022 for mode in modes.values())
    assert (shared / ".code").stat().st_mode & 0o7777 == 0o2775


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
def test_users_have_a_snapshot_each(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = take(project, project / "runs")
    os.chown(first, 54321, -1)
    assert not is_intact(first)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert take(project, project / "runs") != first
