"""Locks: held by children too, released by death, shared by a group."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobkit.cli.main import main
from jobkit.run.locks import Lock, file_system


def test_a_lock_is_exclusive_and_says_so(tmp_path: Path) -> None:
    lock, other = Lock(tmp_path / "a" / "x"), Lock(tmp_path / "a" / "x")
    assert not lock.is_held()
    with lock:
        assert other.is_held()
    assert not other.is_held()


def test_a_child_that_inherited_a_lock_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "x")
    with lock:
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], pass_fds=lock.inheritable(), close_fds=True
        )
    assert Lock(tmp_path / "x").is_held()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not Lock(tmp_path / "x").is_held()


def test_a_group_that_shares_the_folder_shares_its_locks(tmp_path: Path) -> None:
    shared = tmp_path / "runs"
    shared.mkdir()
    shared.chmod(0o2775)
    with Lock(shared / ".locks" / "x"):
        pass
    assert (shared / ".locks").stat().st_mode & 0o7777 == 0o2775
    assert (shared / ".locks" / "x").stat().st_mode & 0o777 == 0o664


def test_two_may_look_at_a_lock_at_once(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with (tmp_path / "x").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not Lock(tmp_path / "x").is_held()


MOUNTINFO = r"""
30 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw,errors=remount-ro
31 30 0:25 / /dev/shm rw,nosuid,nodev shared:2 - tmpfs tmpfs rw,size=24684092k,inode64
40 30 0:52 / /home rw,relatime shared:80 - nfs4 fs1.lab:/home rw,vers=4.2,hard,proto=tcp,timeo=600,local_lock=none,addr=10.0.0.1
41 30 0:53 / /nolock rw,relatime - nfs fs2:/n rw,vers=3,hard,nolock,proto=tcp,mountproto=tcp,local_lock=all,addr=10.0.0.2
42 30 0:54 / /local_lock rw,relatime - nfs fs2:/n rw,vers=3,hard,proto=tcp,mountproto=tcp,local_lock=flock,addr=10.0.0.2
43 30 0:55 / /posix rw,relatime - nfs fs2:/n rw,vers=3,hard,proto=tcp,mountproto=tcp,local_lock=posix,addr=10.0.0.2
44 30 0:56 / /lustre rw,relatime shared:82 - lustre 10.0.0.1@o2ib:/lfs rw,flock,user_xattr,lazystatfs,encrypt
45 30 0:57 / /lustre/localflock rw,relatime shared:83 - lustre 10.0.0.1@o2ib:/lfs rw,localflock,user_xattr,lazystatfs
46 30 0:58 / /mnt/beegfs rw,relatime shared:84 - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf
47 40 0:59 / /home/this_job/remote rw,nosuid,nodev shared:85 - fuse.sshfs this_job@host:/data rw,user_id=1000,group_id=1000
48 30 0:60 / /mnt/My\040Share rw,relatime shared:86 - cifs //nas/share rw,vers=3.1.1,cache=strict,username=this_job,soft,serverino
49 30 0:61 / /mnt/nobrl rw,relatime shared:87 - cifs //nas/share rw,vers=3.1.1,cache=strict,username=this_job,soft,nobrl
50 30 0:62 / /docker rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker/l/A,upperdir=/var/lib/docker/u,workdir=/w
51 30 8:18 / /gfs rw,relatime - gfs2 /dev/mapper/gfs rw
52 30 8:33 / /over rw,relatime - nfs4 fs1.lab:/over rw,vers=4.2,local_lock=none
53 52 8:34 / /over rw,relatime - xfs /dev/sdb1 rw,attr2,inode64
""".strip()  # noqa: E501


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/tmp/runs", ("ext4", "own")),
        ("/dev/shm/runs", ("tmpfs", "own")),
        ("/home/this_job/runs", ("nfs4", "all")),
        ("/homestead/runs", ("ext4", "own")),
        ("/nolock/runs", ("nfs", "host")),
        ("/local_lock/runs", ("nfs", "host")),
        ("/posix/runs", ("nfs", "all")),
        ("/lustre/runs", ("lustre", "all")),
        ("/lustre/localflock/runs", ("lustre", "host")),
        ("/mnt/beegfs/runs", ("beegfs", "unknown")),
        ("/home/this_job/remote/runs", ("fuse.sshfs", "host")),
        ("/mnt/My Share", ("cifs", "unknown")),
        ("/mnt/nobrl/runs", ("cifs", "host")),
        ("/docker/runs", ("overlay", "own")),
        ("/gfs/runs", ("gfs2", "all")),
        ("/over/runs", ("xfs", "own")),
    ],
)
def test_the_hosts_that_see_the_locks_of_a_file_system(path: str, expected: tuple[str, str]) -> None:
    assert file_system(MOUNTINFO, Path(path)) == expected


@pytest.mark.parametrize(
    ("flock", "code", "words"),
    [
        (fcntl.flock, 0, "locks work"),
        (fcntl.lockf, 0, "locks work"),  # as NFS does it: a process excludes others, and not itself
        (lambda descriptor, kind: None, 1, "its locks exclude nobody"),
    ],
    ids=["flock", "as over NFS", "none"],
)
def test_doctor_tries_a_lock_from_another_process(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flock: Any,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    assert main(["doctor", "--local", "--runs-dir", str(tmp_path / "runs")]) == code
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True).stdout.strip()
    said = capsys.readouterr().out
    assert words in said
    assert f"({kind.removesuffix('/ext3')[:3]}" in said  # `ext2/ext3` is what stat calls ext4
