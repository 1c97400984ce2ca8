"""tools/prepare_imagenet.py on a small tree of made-up classes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

TOOL = Path(__file__).parents[2] / "tools" / "prepare_imagenet.py"


def prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two classes: ordinary, grey and CMYK images, one cut short and one that is no image."""
    root = tmp_path / "train"
    for name in ("n01", "n02"):
        (root / name).mkdir(parents=True)
    noise(100, 60).save(root / "n01" / "a.JPEG")
    noise(50, 80).convert("L").save(root / "n01" / "grey.JPEG")
    noise(90, 90).convert("CMYK").save(root / "n02" / "cmyk.jpg")
    whole = (root / "n01" / "a.JPEG").read_bytes()
    (root / "n02" / "cut.JPEG").write_bytes(whole[: len(whole) // 2])
    (root / "n02" / "text.JPEG").write_text("no image")
    return root


def without_broken(source: Path) -> Path:
    for name in ("cut", "text"):
        (source / "n02" / f"{name}.JPEG").unlink()
    return source


def test_the_layout_the_pixels_and_the_broken_images(source: Path, tmp_path: Path) -> None:
    result = prepare(source, tmp_path / "out", "--res", 16, "--workers", 2)
    assert result.returncode == 0, result.stderr
    box = tmp_path / "out" / "train_16" / "box"
    made = sorted(str(path.relative_to(box)) for path in box.rglob("*.*"))
    assert made == ["n01/a.png", "n01/grey.png", "n02/cmyk.png"]
    with Image.open(source / "n01" / "a.JPEG") as original, Image.open(box / "n01" / "a.png") as small:
        assert small.mode == "RGB"
        assert np.array_equal(small, original.resize((16, 16), Image.Resampling.BOX))
    broken = (tmp_path / "out" / "broken_16.txt").read_text()
    assert [Path(line.split(": ")[0]).name for line in broken.splitlines()] == ["cut.JPEG", "text.JPEG"]
    assert "3 made, 0 already there, 2 broken" in result.stdout
    assert "text.JPEG" in result.stderr


def test_a_second_run_makes_only_what_is_missing_or_not_whole(source: Path, tmp_path: Path) -> None:
    assert prepare(source, tmp_path, "--res", 8).returncode == 0
    box = tmp_path / "train_8" / "box"
    kept, cut, missing = box / "n01" / "a.png", box / "n01" / "grey.png", box / "n02" / "cmyk.png"
    before = kept.stat().st_mtime_ns
    expected = cut.read_bytes()
    cut.write_bytes(expected[:50])
    missing.unlink()
    (source / "n02" / "cut.JPEG").unlink()
    (source / "n02" / "text.JPEG").unlink()
    result = prepare(source, tmp_path, "--res", 8)
    assert "2 made, 1 already there, 0 broken" in result.stdout
    assert kept.stat().st_mtime_ns == before
    assert cut.read_bytes() == expected
    assert missing.exists()
    assert not (tmp_path / "broken_8.txt").exists()


def test_crop_takes_the_centred_square_into_a_folder_of_its_own(source: Path, tmp_path: Path) -> None:
    assert prepare(source, tmp_path, "--res", 8, "--crop").returncode == 0
    with Image.open(source / "n01" / "a.JPEG") as original:
        square = original.crop((20, 0, 80, 60)).resize((8, 8), Image.Resampling.BOX)
    with Image.open(tmp_path / "train_cropped_8" / "box" / "n01" / "a.png") as small:
        assert np.array_equal(small, square)


def test_a_grey_image_of_16_bits_is_broken_and_not_white(source: Path, tmp_path: Path) -> None:
    without_broken(source)
    Image.fromarray(np.full((9, 9), 5000, np.uint16)).save(source / "n01" / "deep.png")
    assert "3 made, 0 already there, 1 broken" in prepare(source, tmp_path, "--res", 8).stdout
    assert "deep.png: more than 8 bits a pixel" in (tmp_path / "broken_8.txt").read_text()


def test_images_made_otherwise_do_not_count_as_made(source: Path, tmp_path: Path) -> None:
    without_broken(source)
    common = tmp_path / "out", "--res", 8, "--name", "mine"
    assert prepare(source, *common).returncode == 0
    said = prepare(source, *common, "--crop")
    assert said.returncode == 2 and "n01 was made without --crop: give another --name" in said.stderr
    blurred = shutil.copytree(source, tmp_path / "blurred")
    said = prepare(blurred, *common)
    assert said.returncode == 2 and f"n01 is of {source}: give this source a --name of its own" in said.stderr
    shutil.copytree(blurred / "n01", tmp_path / "rest" / "n03")
    assert "2 made, 0 already there" in prepare(tmp_path / "rest", *common).stdout  # classes on another disk
    source.rename(tmp_path / "moved")
    assert "0 made, 3 already there" in prepare(tmp_path / "moved", *common).stdout
    for change in (lambda file: noise(100, 60, seed=1).save(file), Path.unlink):
        other = shutil.copytree(tmp_path / "moved", tmp_path / "other", dirs_exist_ok=True)
        change(other / "n01" / "grey.JPEG")
        (tmp_path / "moved").rename(tmp_path / "away")
        said = prepare(other, *common)  # of the same names, where the other source is on a disk that is away
        assert said.returncode == 2 and f"n01 is of {tmp_path / 'moved'}" in said.stderr
        (tmp_path / "away").rename(tmp_path / "moved")


def test_two_images_of_one_name_are_refused(source: Path, tmp_path: Path) -> None:
    noise(9, 9, seed=1).save(source / "n01" / "a.png")
    said = prepare(source, tmp_path, "--res", 8)
    assert said.returncode == 2 and "a.JPEG and a.png would both be a.png; rename one of them" in said.stderr
    assert not (tmp_path / "train_8" / "box" / "n01").exists()


def test_a_name_that_is_no_text_is_listed_as_it_is(source: Path, tmp_path: Path) -> None:
    name = b"\xff\xe9.JPEG"
    Path(os.fsdecode(bytes(source) + b"/n02/" + name)).write_text("no image")
    assert "3 made, 0 already there, 3 broken" in prepare(source, tmp_path, "--res", 8).stdout
    assert name + b": cannot identify" in (tmp_path / "broken_8.txt").read_bytes()


def test_images_are_made_where_nobody_reads_what_is_said(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), str(source), str(tmp_path), "--res", "8"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "train_8").glob("box/*/*.png"))) == 3


def test_wrong_input_is_one_line_and_exit_code_2(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, expected in [
        ((tmp_path / "nowhere", tmp_path), "no such folder"),
        ((tmp_path / "empty", tmp_path), "no images in it"),
        ((source, tmp_path / "file" / "out"), "cannot be written"),
    ]:
        result = prepare(*arguments)
        assert result.returncode == 2
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_leaves_whole_images_and_the_same_command_continues(tmp_path: Path) -> None:
    source, box = tmp_path / "train", tmp_path / "train_4" / "box"
    (source / "n01").mkdir(parents=True)
    noise(300, 300).save(source / "n01" / "000.JPEG")
    for i in range(1, 400):
        os.link(source / "n01" / "000.JPEG", source / "n01" / f"{i:03}.JPEG")
    # Two images that do not come before we say so, one for each worker: the tool cannot have ended before Ctrl-C.
    stuck = [source / "n01" / name for name in ("040.JPEG", "100.JPEG")]
    for file in stuck:
        file.unlink()
        os.mkfifo(file)
    command = [sys.executable, str(TOOL), str(source), str(tmp_path), "--res", "4", "--workers", "2"]
    # A group of its own: Ctrl-C in a terminal reaches the workers too.
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell lets what it starts in the background ignore Ctrl-C, the tests too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while len(list(box.glob("n01/*.png"))) < 40 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2)  # the workers are stuck, the tool hears of it first
    while process.poll() is None and time.monotonic() < deadline:
        for file in stuck:
            with contextlib.suppress(OSError):  # there is nobody who reads it
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(0.02)
    _, message = process.communicate(timeout=600)
    assert process.returncode == 130, message
    assert "the same command continues" in message
    assert "Traceback" not in message
    made = len(list(box.glob("n01/*.png")))
    assert 40 <= made < 400
    assert not list(box.glob("n01/.*"))
    for file in stuck:
        file.unlink()
        os.link(source / "n01" / "000.JPEG", file)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"{400 - made} made, {made} already there, 0 broken" in again.stdout
