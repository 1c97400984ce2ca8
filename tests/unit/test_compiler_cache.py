"""The folder of what is compiled: whose it is, what fills it, who removes it, and what is kept of it."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import torch

from jobkit.run import archive, compiler_cache
from jobkit.run.archive import DamagedArchive
from jobkit.run.compiler_cache import FOLDER, KEEP_DAYS
from jobkit.run.events import Event
from jobkit.run.records import Lease, write
from jobkit.run.rundir import RunDir
from jobkit.supervisor import cache_keeper
from jobkit.supervisor.cache_keeper import CacheKeeper


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of an attempt 1, on a node with nothing on it."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", FOLDER):
        monkeypatch.setenv(name, "")  # to have it back as it was
        monkeypatch.delenv(name)
    run = RunDir(tmp_path / "runs" / "toy-1.5b-12345678")
    run.path.mkdir(parents=True)
    write(run.lease_file, Lease(attempt=1, job_id="1", host="here", node=None))
    return run


def folder_of(run: RunDir, code: str = "code1") -> Path:
    folder = compiler_cache.folder_of(run, code)
    assert folder is not None
    return folder


def use(run: RunDir, monkeypatch: pytest.MonkeyPatch, code: str = "code1") -> Path:
    """As a rank that begins."""
    folder = folder_of(run, code)
    for name, value in compiler_cache.variables(folder, {}).items():
        monkeypatch.setenv(name, value)
    compiler_cache.use(run)
    return folder


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def save(run: RunDir) -> None:
    """As the supervisor of an attempt that ends."""
    keeper = CacheKeeper(run, 1)
    keeper.environment("code1")
    keeper.end(wait=True)


def test_what_an_attempt_has_compiled_is_there_on_the_next_node(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use(run, monkeypatch)
    put(folder / "inductor/ab/kernel.so", "machine code")
    put(folder / "inductor/locks/kernel.lock", "")
    put(folder / "triton/tmp.pid_1/half", "ha")
    save(run)
    assert archive.contents(run.compiled_archive(compiler_cache.version(folder))) == {"inductor/ab/kernel.so": 12}

    (tmp_path / "other").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    assert folder_of(run) != folder
    assert compiler_cache.files_in(use(run, monkeypatch)) == {"inductor/ab/kernel.so": 12}


def test_what_is_on_the_node_already_stays(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = use(run, monkeypatch)
    put(folder / "triton/kernel", "new")
    assert compiler_cache.files_in(use(run, monkeypatch)) == {"triton/kernel": 3}


def test_empty_folders_that_torch_has_made_before_do_not_keep_it_from_being_filled(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use(run, monkeypatch)
    put(folder / "triton/kernel", "code")
    save(run)
    (folder / ".used").unlink()
    (folder / "triton/kernel").unlink()
    (folder / "inductor").mkdir(exist_ok=True)
    assert compiler_cache.files_in(use(run, monkeypatch)) == {"triton/kernel": 4}


@pytest.mark.skipif(sys.platform != "linux", reason="only its shared objects are looked at")
def test_a_shared_object_that_a_killed_linker_has_left_in_part_is_neither_saved_nor_kept(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(run)
    whole = next(Path(torch.__file__).parent.glob("_C.*.so"))
    for name, data in (("whole", whole.read_bytes()), ("torn", whole.read_bytes()[:4000]), ("empty", b"")):
        put(folder / f"inductor/{name}.so", "")
        (folder / f"inductor/{name}.so").write_bytes(data)
    assert list(compiler_cache.files_in(folder)) == ["inductor/whole.so"]
    (folder / ".used").touch()  # an attempt before has filled it
    use(run, monkeypatch)
    (folder / "inductor/torn.so").write_bytes(b"")  # a rank that lives may be writing it
    use(run, monkeypatch)
    assert sorted(file.name for file in folder.glob("inductor/*.so")) == ["torn.so", "whole.so"]


@pytest.mark.parametrize("change", [lambda data: data[:-7], lambda data: data.replace(b"code", b"cope"), lambda _: b""])
def test_a_damaged_archive_is_not_used_and_named_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: object
) -> None:
    folder = folder_of(run)
    put(Path(f"{folder}.source/kernel"), "code")
    file = run.compiled_archive(compiler_cache.version(folder))
    file.parent.mkdir()
    archive.pack(Path(f"{folder}.source"), ["kernel"], file)
    file.write_bytes(change(file.read_bytes()))  # type: ignore[operator]
    monkeypatch.setattr("jobkit.log.log.propagate", True)
    for _ in range(2):
        assert compiler_cache.files_in(use(run, monkeypatch)) == {}
    assert [one.message for one in caplog.records] == [
        f"what was compiled before is not used: {file}: the checksum is another one"
    ]


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "link"])
def test_an_archive_puts_nothing_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(member)
    (tmp_path / "packed").write_bytes(plain.getvalue() + hashlib.sha256(plain.getvalue()).digest())
    with pytest.raises(DamagedArchive):
        archive.unpack(tmp_path / "packed", inside)
    assert not (tmp_path / "outside").exists() and not Path("/tmp/outside").exists()
    assert not list(inside.iterdir())


def test_a_folder_of_somebody_elses_is_not_used(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    root = folder_of(run).parent
    root.symlink_to(tmp_path / "theirs")
    assert CacheKeeper(run, 1).environment("code1") == {}
    use(run, monkeypatch)
    assert not any(name in os.environ for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"))
    assert not list((tmp_path / "theirs").iterdir())


def test_the_folder_is_this_users_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(run).parent
    root.mkdir(mode=0o755)
    use(run, monkeypatch)
    assert root.stat().st_mode & 0o777 == 0o700


def test_variables_that_the_user_has_set_stay() -> None:
    found = compiler_cache.variables(Path("/node/x"), {"CUDA_CACHE_PATH": "/mine"})
    assert "CUDA_CACHE_PATH" not in found and found["TORCHINDUCTOR_CACHE_DIR"] == "/node/x/inductor"
    found = compiler_cache.variables(Path("/node/x"), {"TORCHINDUCTOR_CACHE_DIR": "/mine"})
    assert found == {FOLDER: "/node/x", "CUDA_CACHE_PATH": "/node/x/cuda", **HEADERS}
    assert compiler_cache.variables(Path("/node/x"), {"TORCHINDUCTOR_CACHE_DIR": "/a", "CUDA_CACHE_PATH": "/b"}) == {}


HEADERS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def test_what_torch_or_the_rank_around_us_has_set_is_not_the_users() -> None:
    around = compiler_cache.variables(Path("/node/other"), {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"})
    assert around["TORCHINDUCTOR_CACHE_DIR"] == "/node/other/inductor"
    assert compiler_cache.variables(Path("/node/x"), around)["TRITON_CACHE_DIR"] == "/node/x/triton"
    mine = {"TORCHINDUCTOR_CACHE_DIR": "/scratch/torchinductor_me"}
    assert "TORCHINDUCTOR_CACHE_DIR" not in compiler_cache.variables(Path("/node/x"), mine)


def test_another_version_of_the_code_has_a_folder_of_its_own(run: RunDir, tmp_path: Path) -> None:
    assert folder_of(run) != folder_of(run, "code2")
    assert folder_of(run) != folder_of(RunDir(tmp_path / "elsewhere" / run.name))


def test_only_the_archive_of_the_newest_code_is_kept(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.compiled.mkdir()
    run.compiled_archive("code0-2.0-ffffffff").touch()
    (run.compiled / ".code1-2.0-ffffffff.tar.gone.1.1.tmp").touch()
    put(use(run, monkeypatch) / "triton/kernel", "code")
    save(run)
    assert [file.name for file in run.compiled.iterdir()] == [f"{compiler_cache.version(folder_of(run))}.tar"]


def test_what_is_too_large_is_not_saved_and_said_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_keeper, "MAX_BYTES", 3)
    monkeypatch.setattr("jobkit.log.log.propagate", True)
    caplog.set_level("INFO")
    put(use(run, monkeypatch) / "triton/kernel", "code")
    save(run)
    assert not run.compiled.exists()
    assert len([one for one in caplog.records if "not saved" in one.message]) == 1


def test_an_attempt_that_has_lost_the_run_saves_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    put(use(run, monkeypatch) / "triton/kernel", "code")
    write(run.lease_file, Lease(attempt=2, job_id="1", host="there", node=None))
    save(run)
    assert not run.compiled.exists()


def test_a_stop_does_not_wait_for_a_file_server_that_does_not_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(use(run, monkeypatch) / "triton/kernel", "code")
    run.lease_file.unlink()
    os.mkfifo(run.lease_file)  # who reads it waits
    keeper = CacheKeeper(run, 1)
    keeper.environment("code1")
    keeper.end(wait=False)
    (thread,) = (one for one in threading.enumerate() if one.name == "cache keeper")
    run.lease_file.write_text("")
    thread.join()
    assert not run.compiled.exists()


def test_a_run_directory_that_is_away_costs_a_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(use(run, monkeypatch) / "triton/kernel", "code")
    run.compiled.touch()  # no folder can be made there
    monkeypatch.setattr("jobkit.log.log.propagate", True)
    save(run)
    (line,) = (one.message for one in caplog.records)
    assert line.startswith("what was compiled cannot be written: ")


HOLD = "import sys; from pathlib import Path; from jobkit.run.compiler_cache import hold; hold(Path(sys.argv[1])); "


def test_old_folders_are_removed_unless_somebody_uses_them(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(run).parent
    root.mkdir(mode=0o700)
    old, used, young = (root / name for name in ("old@1", "used@1", "young@1"))
    long_ago = time.time() - KEEP_DAYS * 86400 - 60
    for folder in (old, used, young):
        put(folder / "triton/kernel", "code")
        (folder / ".used").touch()
        if folder != young:
            os.utime(folder, (long_ago, long_ago))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD + "print(flush=True); input()", str(used)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        use(run, monkeypatch)
        assert not old.exists() and used.exists() and young.exists()
        holder.communicate()


def test_the_end_of_a_run_and_an_attempt_that_compiled_nothing_leave_nothing_on_the_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_finished in (False, True):
        folder = folder_of(run)
        put(folder / "inductor/.empty", "")
        if is_finished:
            put(folder / "inductor/kernel", "code")
            run.record(Event.SUBMITTING, cluster="local", scheduler="local")
            run.record(Event.STARTED, attempt=1, job_id="1", host="here")
            run.record(Event.FINISHED, attempt=1)
        save(run)
        assert not folder.exists()
        assert not run.compiled.exists()


def test_a_cache_is_of_one_kind_of_processor(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    here = folder_of(run)
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert folder_of(run) != here
