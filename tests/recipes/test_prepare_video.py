"""From videos and captions to a clip that is watched: tools/prepare_video.py, the recipes, tools/decode_video.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import av
import decode_video
import numpy as np
import prepare_video
import preparing
import processes
import pytest
import torch
from harness.cogvideo_weights import (
    CAPTIONS,
    CHANNELS,
    FEATURES,
    WORDS,
    small_transformer,
    write_encoders,
    write_video,
)
from harness.experiment_folder import Folder
from harness.project import status
from PIL import Image, ImageSequence
from preparing import Done, Failure
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, T5EncoderModel
from videos import find_videos, read_frames

from experiments.cogvideo.clips import Clips, write_index
from experiments.cogvideo.decoder import decode, load_vae
from experiments.cogvideo.published import load_published
from experiments.cogvideo.transformer import VideoTransformer
from jobkit import JobkitError
from jobkit.train.video import mp4

TOOLS = Path(__file__).parents[2] / "tools"
SIZE = ("--frames", 9, "--height", 32, "--width", 48, "--words", WORDS)
LATENT = (CHANNELS, 3, 4, 6)


def command(tool: str, *arguments: object) -> list[str]:
    return [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def arrays(folder: Path) -> dict[str, dict[str, list]]:
    """What is in the files, but for what they say of the source."""
    return {name: {key: value.tolist() for key, value in load(data).items()} for name, data in files(folder).items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoders(tmp_path_factory.mktemp("CogVideoX"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four videos with captions as sat/ has them, one without, one that is no video, and one without frames to take."""
    root = tmp_path_factory.mktemp("source")
    (root / "labels").mkdir()
    for number, caption in enumerate(CAPTIONS):
        write_video(root / "videos" / f"{number}.mp4", 20 + 10 * number)
        (root / "labels" / f"{number}.txt").write_text(f"{caption}\nnot this line\n")
    write_video(root / "videos" / "silent.mp4", 20)
    write_video(root / "videos" / "short.mp4", 5)
    (root / "videos" / "text.mp4").write_text("no video")
    for name in ("short", "text"):
        (root / "labels" / f"{name}.txt").write_text("something")
    return root


@pytest.fixture(scope="module")
def prepared(source: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two commands make of the videos that run at once: for all of them in two processes, and for every second."""
    folder = tmp_path_factory.mktemp("prepared")
    common = source, folder, "--weights", weights, *SIZE
    together = [
        subprocess.Popen(command("prepare_video", *common, *how), stderr=subprocess.PIPE, text=True)
        for how in (("--workers", 2), ("--workers", 1, "--part", "2/2"))
    ]
    for process in together:
        _, printed = process.communicate(timeout=500)
        assert process.returncode == 0, printed
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a tool in this process alone, and gives what it prints: most of a start is the imports of the libraries."""

    def spread(function: Callable[[object], Done], items: list[object], *_: object) -> Done:
        return sum((function(item) for item in items), Done())

    def main(tool: ModuleType, *arguments: object, expect: int = 0) -> str:
        monkeypatch.setattr(processes, "spread", spread)
        monkeypatch.setattr(sys, "argv", ["tool", *map(str, arguments)])
        capfd.readouterr()
        try:
            code = tool.main()
        except SystemExit as error:  # argparse's
            code = error.code
        printed = capfd.readouterr()
        assert code == expect, printed.err
        return printed.err if expect else printed.out

    return main


# What is in a file


def test_a_file_has_the_latent_and_the_text_that_the_published_classes_give(
    source: Path, weights: Path, prepared: Path
) -> None:
    made = load_file(prepared / "videos" / "1.safetensors")
    assert made["latent"].shape == LATENT and made["text"].shape == (WORDS, FEATURES)

    vae = load_vae(weights / "vae", torch.device("cpu"), torch.float32)
    frames = read_frames(source / "videos" / "1.mp4", 9, 8, (32, 48), 3)
    of = vae.encode((frames / 127.5 - 1).transpose(0, 1)[None]).latent_dist
    drawn = made["latent"] / vae.config.scaling_factor
    deviations = (drawn - of.mean[0]) / of.std[0]
    assert vae.config.scaling_factor == 1.15258426
    assert 0.7 < deviations.std() < 1.3 and abs(deviations.mean()) < 0.3  # drawn, and not the mean

    tokenizer = AutoTokenizer.from_pretrained(weights / "tokenizer")
    encoder = T5EncoderModel.from_pretrained(weights / "text_encoder").eval()
    ids = tokenizer(CAPTIONS[1], padding="max_length", max_length=WORDS, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.allclose(made["text"], encoder(ids).last_hidden_state[0], atol=1e-5)


def test_broken_videos_and_missing_captions_are_listed_with_their_reasons(source: Path, prepared: Path) -> None:
    lines = (prepared / "broken.txt").read_text().splitlines()
    reasons = {Path(line.split(": ")[0]).name: line.split(": ", 1)[1] for line in lines}
    assert reasons["silent.mp4"] == "no caption"
    assert reasons["short.mp4"] == "at most 6 frames in it; the first and the last 3 are passed over"
    assert "Invalid data" in reasons["text.mp4"]
    assert len(reasons) == 3


def test_commands_at_once_make_the_same_bytes_as_one_alone(
    source: Path, weights: Path, prepared: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    assert "4 made, 0 already there, 3 broken" in here(prepare_video, source, tmp_path, "--weights", weights, *SIZE)
    assert files(tmp_path) == files(prepared)
    assert sorted(path.name for path in prepared.glob("broken*")) == ["broken.txt", "broken_2_of_2.txt"]
    assert [path.name for path in prepared.rglob(".*")] == [".texts"]


def test_parts_are_of_all_and_of_nothing_twice(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    common = source, tmp_path, "--weights", weights, *SIZE
    assert "2 made, 0 already there, 2 broken" in here(prepare_video, *common, "--part", "1/2")
    assert "2 made, 0 already there, 1 broken" in here(prepare_video, *common, "--part", "2/2")
    assert "0 made, 4 already there, 3 broken" in here(prepare_video, *common)


def test_a_second_run_makes_what_is_missing_not_whole_or_of_another_caption(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    rows = [{"video": str(source / "videos" / f"{k}.mp4"), "caption": caption} for k, caption in enumerate(CAPTIONS)]
    common = tmp_path / "clips.jsonl", tmp_path / "out", "--weights", weights, *SIZE

    def prepare(rows: list[dict[str, str]]) -> str:
        (tmp_path / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return here(prepare_video, *common)

    assert "3 made, 0 already there, 0 broken" in prepare(rows[:3])
    zero, one, two = sorted((tmp_path / "out").rglob("[0-9].safetensors"))
    before, when = {path: path.read_bytes() for path in (zero, one, two)}, zero.stat().st_mtime_ns
    one.write_bytes(before[one][:-40])
    rows[2]["caption"] = "the grey field"
    assert "3 made, 1 already there, 0 broken" in prepare(rows)
    assert zero.stat().st_mtime_ns == when
    assert one.read_bytes() == before[one]
    assert two.read_bytes() != before[two] and "the grey field" in prepare_video.says(two)
    assert "0 made, 4 already there, 0 broken" in prepare(rows)


def test_what_other_weights_made_is_made_again(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    row = {"video": str(source / "videos" / "0.mp4"), "caption": CAPTIONS[0]}
    (tmp_path / "clips.jsonl").write_text(json.dumps(row) + "\n")
    other = shutil.copytree(weights, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text()) | {"scaling_factor": 0.7}  # as of the 5b
    (other / "vae" / "config.json").write_text(json.dumps(config))
    made = []
    for folder in (weights, shutil.copytree(weights, tmp_path / "copied"), other):
        said = here(prepare_video, tmp_path / "clips.jsonl", tmp_path / "out", "--weights", folder, *SIZE)
        made.append(said.partition(": ")[2].partition(" made")[0])
    assert made == ["1", "0", "1"]


def test_a_video_that_was_replaced_by_one_of_the_same_length_is_made_again_and_one_that_is_only_copied_anew_is_not(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    write_source(source, tmp_path / "cats", {"0": "one", "1": "two"})
    common = tmp_path / "cats", tmp_path / "out", "--weights", weights, *SIZE
    here(prepare_video, *common)
    before = files(tmp_path / "out")
    zero, one = (tmp_path / "cats" / name for name in ("0.mp4", "1.mp4"))
    write_video(tmp_path / "other.mp4", 15)
    (tmp_path / "other.mp4").open("ab").write(b"\0" * (zero.stat().st_size - (tmp_path / "other.mp4").stat().st_size))
    (tmp_path / "other.mp4").rename(zero)
    os.utime(one, (0, 0))
    assert "1 made, 1 already there, 0 broken" in here(prepare_video, *common)
    after = files(tmp_path / "out")
    assert {name for name in after if after[name] != before[name]} == {"0.safetensors"}
    assert "0 made, 2 already there, 0 broken" in here(prepare_video, *common)


def test_another_tokenizer_makes_other_embeddings(source: Path, weights: Path, tmp_path: Path) -> None:
    other = shutil.copytree(weights, tmp_path / "other")
    assert prepare_video.digest_of(other) == prepare_video.digest_of(weights)
    (other / "tokenizer" / "spiece.model").write_bytes(b"another")
    assert prepare_video.digest_of(other) != prepare_video.digest_of(weights)


def test_names_that_are_no_text_are_prepared_and_listed_as_they_are(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    write_source(source, tmp_path / "cats", {"\udcff": "one", "caf\udce9": "two"})
    common = tmp_path / "cats", tmp_path / "out", "--weights", weights, *SIZE
    assert "2 made, 0 already there, 0 broken" in here(prepare_video, *common)
    assert "0 made, 2 already there, 0 broken" in here(prepare_video, *common)
    assert trained_on(tmp_path / "out") == ["%FF.safetensors", "caf%E9.safetensors"]
    assert len(Clips(tmp_path / "out", tmp_path / "out.npy", LATENT, (WORDS, FEATURES))[1]) == 2
    (tmp_path / "cats" / "caf\udce9.mp4").write_text("no video")
    assert "0 made, 1 already there, 1 broken" in here(prepare_video, *common)
    assert b"/caf\xe9.mp4: " in (tmp_path / "out" / "broken.txt").read_bytes()


def test_a_video_that_goes_away_meanwhile_ends_nothing(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(source, tmp_path / "cats", {"0": "one", "1": "two"})

    def found_and_removed(*arguments: object) -> object:
        found = find_clips(*arguments)
        (tmp_path / "cats" / "0.mp4").unlink()
        return found

    find_clips = prepare_video.find_clips
    monkeypatch.setattr(prepare_video, "find_clips", found_and_removed)
    said = here(prepare_video, tmp_path / "cats", tmp_path / "out", "--weights", weights, *SIZE)
    assert "1 made, 0 already there, 1 broken" in said


def test_another_text_encoder_with_the_same_settings_makes_other_embeddings(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    other = shutil.copytree(weights, tmp_path / "other", copy_function=shutil.copyfile)
    assert prepare_video.digest_of(other) == prepare_video.digest_of(weights)  # wherever and whenever it was copied to
    (file,) = (other / "text_encoder").glob("*.safetensors")
    state = load_file(file)
    state[max(state)] = state[max(state)] + 1
    save_file(state, file, metadata={"format": "pt"})
    assert prepare_video.digest_of(other) != prepare_video.digest_of(weights)


def test_each_video_that_is_made_is_one_that_is_trained_on(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    names = ("b/c.mp4", "b/.c.mp4", ".hidden/a.mp4", "中文 é/v.1.mp4")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(source / "videos" / "0.mp4", tmp_path / name)
    rows = [json.dumps({"video": name, "caption": CAPTIONS[0]}) for name in names]
    (tmp_path / "clips.jsonl").write_text("\n".join(rows))
    here(prepare_video, tmp_path / "clips.jsonl", tmp_path / "out", "--weights", weights, *SIZE)
    write_index(tmp_path / "out", tmp_path / "clips.npy")
    clips = Clips(tmp_path / "out", tmp_path / "clips.npy", LATENT, (WORDS, FEATURES))
    assert len(clips) == len({tuple(clips[k][0].flatten().tolist()) for k in range(len(clips))}) == len(names)


def write_source(source: Path, folder: Path, captions: dict[str, str]) -> None:
    """A folder of videos 0.mp4 and so on, each with its caption beside it; all are the same one."""
    folder.mkdir(exist_ok=True)
    for name, caption in captions.items():
        shutil.copy(source / "videos" / "0.mp4", folder / f"{name}.mp4")
        (folder / f"{name}.txt").write_text(caption)


def trained_on(folder: Path) -> list[str]:
    return [name.decode() for name, _ in np.load(index_of(folder))]


def index_of(folder: Path) -> Path:
    index = folder.parent / f"{folder.name}.npy"
    index.unlink(missing_ok=True)
    write_index(folder, index)
    return index


def test_two_sources_into_one_folder_leave_each_others_latents(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    write_source(source, tmp_path / "cats", {"0": "cats", "1": "cats"})
    write_source(source, tmp_path / "dogs", {"0": "cats", "1": "dogs", "2": "dogs"})
    common = tmp_path / "out", "--weights", weights, *SIZE
    here(prepare_video, tmp_path / "cats", *common)
    before = files(tmp_path / "out")
    (tmp_path / "dogs" / "1.mp4").write_text("no video")
    assert "1 made, 0 already there, 2 broken" in here(prepare_video, tmp_path / "dogs", *common)
    assert before.items() <= files(tmp_path / "out").items()
    lines = (tmp_path / "out" / "broken.txt").read_text().splitlines()
    refused = f"0.safetensors is of a video of this name in {tmp_path / 'cats'}: give this source a DST of its own"
    assert lines[0].endswith(refused) and len(lines) == 2
    assert "0 made, 2 already there, 0 broken" in here(prepare_video, tmp_path / "cats", *common)


def test_a_source_that_was_moved_is_the_same_one(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    write_source(source, tmp_path / "cats", {"0": "one", "1": "two"})
    common = tmp_path / "out", "--weights", weights, *SIZE
    here(prepare_video, tmp_path / "cats", *common)
    (tmp_path / "cats").rename(tmp_path / "moved")
    (tmp_path / "moved" / "1.txt").write_text("three")
    assert "1 made, 1 already there, 0 broken" in here(prepare_video, tmp_path / "moved", *common)


def test_latents_of_videos_that_the_source_has_no_more_are_told_and_stay(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    write_source(source, tmp_path / "cats", {"0": "one", "1": "two"})
    write_source(source, tmp_path / "dogs", {"2": "three"})
    common = tmp_path / "out", "--weights", weights, *SIZE
    for name in ("cats", "dogs"):
        here(prepare_video, tmp_path / name, *common)
    listed = tmp_path / "out" / "left_over.txt"
    assert not listed.exists()
    (tmp_path / "cats" / "1.mp4").rename(tmp_path / "1.mp4")
    prepare_video.tell_left_over(find_videos(tmp_path / "cats"), tmp_path / "out")
    assert f"1 in {tmp_path / 'out'} of videos that the source does not have any more" in capfd.readouterr().err
    here(prepare_video, tmp_path / "cats", *common)
    assert listed.read_text() == f"{tmp_path / 'out' / '1.safetensors'}\n"
    assert len(trained_on(tmp_path / "out")) == 3
    (tmp_path / "1.mp4").rename(tmp_path / "cats" / "1.mp4")
    here(prepare_video, tmp_path / "cats", *common)
    assert not listed.exists()


def test_what_was_made_of_a_video_that_is_broken_or_has_no_caption_now_is_set_aside(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    write_source(source, tmp_path / "cats", {"0": "one", "1": "two", "2": "three"})
    common = tmp_path / "cats", tmp_path / "out", "--weights", weights, *SIZE
    here(prepare_video, *common)
    before = files(tmp_path / "out")
    (tmp_path / "cats" / "1.mp4").write_text("no video")
    (tmp_path / "cats" / "2.txt").unlink()
    assert "0 made, 1 already there, 2 broken" in here(prepare_video, *common)
    assert trained_on(tmp_path / "out") == ["0.safetensors"]
    for name in ("1.safetensors", "2.safetensors"):
        aside = tmp_path / "out" / f"{name}.set_aside"
        assert aside.read_bytes() == before[name] and str(aside) in (tmp_path / "out" / "broken.txt").read_text()


def test_what_was_made_of_a_listed_video_stays_without_it_unless_it_is_of_other_options(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    shutil.copy(source / "videos" / "0.mp4", tmp_path / "0.mp4")
    (tmp_path / "clips.jsonl").write_text(json.dumps({"video": "0.mp4", "caption": "one"}))
    common = tmp_path / "clips.jsonl", tmp_path / "out", "--weights", weights, *SIZE
    here(prepare_video, *common)
    (tmp_path / "0.mp4").unlink()
    assert "1 broken" in here(prepare_video, *common)
    assert trained_on(tmp_path / "out") == ["0.safetensors"]
    assert "1 broken" in here(prepare_video, *common, "--fps", 4)
    assert [path.name for path in (tmp_path / "out").glob("0*")] == ["0.safetensors.set_aside"]


def test_a_video_that_is_being_copied_is_made_when_it_is_whole(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_source(source, tmp_path / "cats", {"0": "one"})
    common = tmp_path / "cats", tmp_path / "out", "--weights", weights, *SIZE

    def and_then_the_rest(path: Path, *how: object) -> Tensor:
        frames = read_frames(path, *how)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # as long as before: its room was kept free for it
        return frames

    with monkeypatch.context() as patched:
        patched.setattr(prepare_video.videos, "read_frames", and_then_the_rest)
        assert "0 made, 0 already there, 1 broken" in here(prepare_video, *common)
    assert "written while it was read" in (tmp_path / "out" / "broken.txt").read_text()
    assert "1 made, 0 already there, 0 broken" in here(prepare_video, *common)


@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-C again and again", "kill -9"])
def test_what_ends_it_ends_its_processes_at_once_and_the_same_command_continues(
    how: str, source: Path, weights: Path, prepared: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    for name in ("videos", "labels"):
        (tmp_path / "source" / name).mkdir(parents=True)
        for file in (source / name).glob("[0-9].*"):
            os.link(file, tmp_path / "source" / name / file.name)
    # A video that never comes: the tool cannot have ended before we say so.
    stuck = tmp_path / "source" / "videos" / "2.mp4"
    stuck.unlink()
    os.mkfifo(stuck)
    arguments = tmp_path / "source", tmp_path / "out", "--weights", weights, *SIZE, "--workers", 1
    process = subprocess.Popen(
        command("prepare_video", *arguments),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal reaches the workers too
        # A shell lets what it starts in the background ignore Ctrl-C, the tests too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "out" / "videos" / "1.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if how == "kill -9":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    while how == "Ctrl-C again and again" and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=200)  # until the last of its processes has closed it
    assert process.returncode == (-signal.SIGKILL if how == "kill -9" else 130), message
    assert message.endswith("prepare_video: interrupted; the same command continues\n") is (how != "kill -9")
    assert "Traceback" not in message
    assert sorted(path.name for path in (tmp_path / "out" / "videos").iterdir()) == ["0.safetensors", "1.safetensors"]
    stuck.unlink()
    os.link(source / "videos" / "2.mp4", stuck)
    assert "2 made, 2 already there, 0 broken" in here(prepare_video, *arguments)
    made, alone = (arrays(folder) for folder in (tmp_path / "out", prepared))
    assert made == {name: alone[name] for name in made}


# Videos and captions


def test_each_form_of_captions_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    (tmp_path / "sub" / "videos").mkdir(parents=True)
    (tmp_path / "sub" / "videos" / "b.MOV").touch()
    (tmp_path / "sub" / "labels").mkdir()
    (tmp_path / "a.txt").write_text("beside it\n")
    (tmp_path / "sub" / "labels" / "b.txt").write_text("\nin labels\nnot this\n")
    walked = find_videos(tmp_path)
    assert [(video.name, video.caption) for video in walked] == [("a", "beside it"), ("sub/videos/b", "in labels")]
    (tmp_path / "list.csv").write_text('video,caption\na.mp4,"one, two"\nsub/videos/b.MOV,\n')
    (tmp_path / "list.jsonl").write_text(
        '{"video": "a.mp4", "caption": " one, two "}\n\n{"video": "sub/videos/b.MOV"}\n'
    )
    for name in ("list.csv", "list.jsonl"):
        assert [(video.name, video.caption) for video in find_videos(tmp_path / name)] == [
            ("a", "one, two"),
            ("sub/videos/b", None),
        ]
    (tmp_path / "videos.txt").write_text("sub/videos/b.MOV\na.mp4\n\n")
    (tmp_path / "prompts.txt").write_text("first\nsecond\n")
    assert [video.caption for video in find_videos(tmp_path)] == ["second", "first"]
    (tmp_path / "prompts.txt").rename(tmp_path / "prompt.txt")
    assert [video.caption for video in find_videos(tmp_path)] == ["second", "first"]


def test_videos_in_a_folder_that_is_a_link_are_found_once(tmp_path: Path) -> None:
    for path in (tmp_path / "disk" / "videos" / "b.mp4", tmp_path / "source" / "a.mp4"):
        path.parent.mkdir(parents=True)
        path.touch()
        path.with_suffix(".txt").write_text("beside it")
    (tmp_path / "source" / "a link").symlink_to(tmp_path / "disk")
    (tmp_path / "source" / "another").symlink_to(tmp_path / "disk" / "videos")
    (tmp_path / "disk" / "around").symlink_to(tmp_path / "source")
    assert [video.name for video in find_videos(tmp_path / "source")] == ["a", "another/b"]


def test_captions_end_at_newlines_alone(tmp_path: Path) -> None:
    one, two = "a cat.\u2028It jumps", "a\x0cdog\x85and \x1cits\x0b tail"
    for name in ("a", "b"):
        (tmp_path / f"{name}.mp4").touch()
    (tmp_path / "a.txt").write_bytes(f"{one}\r\nnot this\r\n".encode())
    (tmp_path / "b.txt").write_bytes(f"{two}\nnot this".encode())
    assert [video.caption for video in find_videos(tmp_path)] == [one, two]
    (tmp_path / "videos.txt").write_bytes(b"a.mp4\r\nb.mp4\r\n\r\n")
    (tmp_path / "prompts.txt").write_bytes(f"{one}\r\n{two}".encode())
    assert [video.caption for video in find_videos(tmp_path)] == [one, two]


def test_the_mark_before_a_text_of_windows_is_no_part_of_a_caption(tmp_path: Path) -> None:
    mark = "\ufeff"
    (tmp_path / "a.mp4").touch()
    (tmp_path / "a.txt").write_text(f"{mark}a cat", encoding="utf-8")
    (tmp_path / "list.csv").write_text(f"{mark}video,caption\na.mp4,a cat\n", encoding="utf-8")
    (tmp_path / "list.jsonl").write_text(f'{mark}{{"video": "a.mp4", "caption": "a cat"}}', encoding="utf-8")
    found = [find_videos(tmp_path / name) for name in (".", "list.csv", "list.jsonl")]
    for name, text in (("videos.txt", "a.mp4"), ("prompts.txt", "a cat")):
        (tmp_path / name).write_text(mark + text, encoding="utf-8")
    found.append(find_videos(tmp_path))
    assert [[(video.name, video.caption) for video in videos] for videos in found] == [[("a", "a cat")]] * 4


@pytest.mark.parametrize(
    ("written", "source", "says"),
    [
        ({"list.csv": "video,caption\na.mp4,one, two"}, "list.csv", "list.csv:2: more fields than columns"),
        ({"videos.txt": "a.mp4\nb.mp4", "prompts.txt": "one"}, ".", "prompts.txt: 1 captions, expected 2"),
        ({"videos.txt": "a.mp4\nb.mp4", "prompts.txt": "one\x0c\n\nthree\n"}, ".", "prompts.txt:2: an empty line"),
        ({"videos.txt": "\na.mp4\nb.mp4", "prompts.txt": "one\ntwo"}, ".", "videos.txt:1: an empty line"),
        ({"videos.txt": "a.mp4", "prompts.txt": "\n"}, ".", "prompts.txt: 0 captions, expected 1"),
        ({"videos.txt": "a.mp4"}, ".", "videos.txt is there and prompts.txt is not"),
        ({"list.csv": "file,text\na.mp4,one"}, "list.csv", "list.csv:2: found file, text, expected a video and a"),
        ({"list.jsonl": "{}"}, "list.jsonl", "list.jsonl:1: found nothing, expected a video"),
        ({"list.jsonl": "[1"}, "list.jsonl", "list.jsonl:1: no JSON"),
        ({"list.jsonl": "[1]"}, "list.jsonl", "list.jsonl:1: found [1], expected {"),
        ({"list.jsonl": '{"video": "a.mp4"}\n' * 2}, "list.jsonl", "a name is one video's"),
        ({}, ".", "no videos in it"),
        ({}, "nowhere", "nowhere: no such folder, .jsonl or .csv file"),
    ],
)
def test_lists_that_say_nothing_are_refused(written: dict[str, str], source: str, says: str, tmp_path: Path) -> None:
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(Failure) as caught:
        find_videos(tmp_path / source)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def shades(frames: Tensor) -> list[int]:
    """The number of each frame, of a video that `write_video` wrote."""
    return [round((frame[:, 8:-8, 8:-8].float().mean().item() - 40) / 4) for frame in frames]


@pytest.mark.parametrize(
    ("frames", "per_second", "taken"),
    [
        (40, 24, [3, 6, 9, 12, 15, 18, 21, 24, 27]),  # 8 of each second
        (50, 8, [3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (40, 12, [3, 4, 6, 7, 9, 10, 12, 13, 15]),  # what is shown at that time
        (24, 24, [3, 5, 7, 9, 11, 13, 15, 17, 19]),  # too short: all of its length, evenly
        (12, 8, [3, 4, 5, 6, 7, 8, 8, 8, 8]),  # of fewer frames: the last again
    ],
)
def test_frames_are_taken_by_time(frames: int, per_second: int, taken: list[int], tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", frames, per_second=per_second)
    found = read_frames(tmp_path / "a.mp4", 9, 8, (48, 64), 3)
    assert found.shape == (9, 3, 48, 64) and found.dtype == torch.uint8
    assert shades(found) == taken


def test_a_frame_is_scaled_until_it_covers_the_size_and_its_middle_is_taken(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", 9, size=(96, 192))
    (frame,) = read_frames(tmp_path / "a.mp4", 1, 8, (48, 64), 0)
    assert frame.shape == (3, 48, 64)
    assert frame[:, :, :8].float().std() < 2  # the bright edge on the left is cut off: 48 x 96 is cut to 48 x 64
    write_video(tmp_path / "b.mp4", 9, size=(96, 64))
    (frame,) = read_frames(tmp_path / "b.mp4", 1, 8, (32, 32), 0)
    assert frame[:, :, 0].min() > 200 and frame[:, :, 8:].max() < 60


def held_on_its_side(video: Path) -> None:
    """Give a video the matrix of a telephone that was held upright: to be shown turned by 90 degrees, clockwise."""
    data = bytearray(video.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    turned = (0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    data[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in turned)
    video.write_bytes(data)


def test_a_video_that_was_held_on_its_side_is_turned(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", 9, size=(48, 64))
    held_on_its_side(tmp_path / "a.mp4")
    (frame,) = read_frames(tmp_path / "a.mp4", 1, 8, (64, 48), 0)
    assert frame[:, :4].min() > 200 and frame[:, 8:].max() < 60  # the edge on the left is at the top


def test_a_video_of_sound_alone_has_no_video_in_it(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ValueError, match="no video in it"):
        read_frames(tmp_path / "a.mp4", 9, 8, (48, 64), 3)


# Wrong input


def test_wrong_input_is_one_line_and_exit_code_2(
    source: Path, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    (tmp_path / "file").touch()
    for arguments, says in [
        ([source, tmp_path, "--weights", tmp_path], "no vae/config.json in it; --weights is a folder of CogVideoX"),
        ([tmp_path / "nowhere", tmp_path, "--weights", weights], "nowhere: no such folder"),
        (
            [source, tmp_path, "--weights", tmp_path / "none"],
            "none: no such folder; --weights is a folder of CogVideoX",
        ),
        ([source, tmp_path / "file" / "out", "--weights", weights, *SIZE], "cannot be written"),
        ([source, tmp_path, "--weights", weights, "--frames", 10], "--frames: found 10, expected a multiple of 4 and"),
        ([source, tmp_path, "--weights", weights, "--width", 40], "--width: found 40, expected a multiple of 16"),
        ([source, tmp_path, "--weights", weights, "--part", "3/2"], "found 3/2, expected I/N"),
        ([source, tmp_path, "--weights", weights, "--device", "cuda:9"], "--device: found cuda:9, and torch sees"),
        ([source, tmp_path, "--weights", weights, "--device", "tpu9"], "--device: found tpu9, expected one of"),
        ([source, tmp_path, "--weights", weights, "--workers", 0], "--workers: found 0, expected 1 or more"),
    ]:
        assert says in here(prepare_video, *arguments, expect=2).splitlines()[-1]
    for arguments, says in [
        ([tmp_path, tmp_path, "--weights", tmp_path], "no vae/config.json in it"),
        ([tmp_path, tmp_path, "--weights", tmp_path / "none"], "such as a copy of huggingface.co/THUDM/CogVideoX-2b"),
        ([tmp_path, tmp_path, "--weights", weights], "no .safetensors files in it"),
    ]:
        assert says in here(decode_video, *arguments, expect=2).splitlines()[-1]


def test_a_decoder_says_what_it_cannot_load_or_decode(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(JobkitError, match=r"text_encoder: no AutoencoderKLCogVideoX can be loaded from it: .*"):
        load_vae(weights / "text_encoder", torch.device("cpu"), torch.float32)
    vae = load_vae(weights / "vae", torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="latent is 3 x 3 x 4 x 6, expected 4 x frames x height x width"):
        decode(vae, torch.zeros(3, 3, 4, 6))
    with pytest.raises(ValueError, match="an MP4's height and width are even"):
        mp4(torch.zeros(2, 3, 5, 6, dtype=torch.uint8))


def test_where_accelerate_is_not_installed_nothing_is_said_of_it(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(
        "import importlib.metadata, importlib.util, pathlib, sys, torch\n"
        "find_spec, version = importlib.util.find_spec, importlib.metadata.version\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'accelerate' else find_spec(name, *more)\n"
        "from experiments.cogvideo.decoder import load_vae\n"
        "import diffusers.utils.import_utils as utils\n"
        "assert not utils.is_accelerate_available()\n"
        "load_vae(pathlib.Path(sys.argv[1]), torch.device('cpu'), torch.float32)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "without.py"), str(weights / "vae")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "accelerate" not in done.stdout + done.stderr, done.stderr


def test_in_tiles_it_is_nearly_the_same_video(weights: Path) -> None:
    latent = torch.randn(CHANNELS, 3, 12, 10)
    whole, tiled = (
        decode(load_vae(weights / "vae", torch.device("cpu"), torch.float32, tiling=tiling), latent).float()
        for tiling in (False, True)
    )
    assert whole.shape == tiled.shape == (9, 3, 96, 80)
    assert (whole - tiled).abs().mean() < 0.5 * (whole - whole.mean()).abs().mean()


# From videos to a clip


def frames_of(video: Path) -> np.ndarray:
    with av.open(str(video)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


SMALL = (
    f"params={{latent: {list(LATENT)}, text: [{WORDS}, {FEATURES}], held_out: 1, workers: 0, steps: 3, batch: 2,"
    " warmup: 1, samples: 3, denoising_steps: 2,"
    " model: {dim: 32, layers: 2, heads: 4, time: 16, rescale: 1.875, recompute: false}}"
)


def submit(folder: Folder, recipe: str, *overrides: str, ranks: int, expect: int = 0) -> str:
    resources = f"resources={{nodes: 1, tasks_per_node: {ranks}, gpus_per_task: 0, cpus_per_task: 1}}"
    arguments = ("submit", f"experiments/{recipe}", "--local", resources, "precision=fp32", *overrides)
    return folder.python("-m", "jobkit", *arguments, expect=expect)


def test_from_videos_over_training_and_sampling_to_clips_that_can_be_watched(
    weights: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Callable[..., str]
) -> None:
    monkeypatch.setenv("COGVIDEO_DATA", str(prepared))
    folder = Folder(tmp_path / "folder", "cogvideo", "write_shown")
    submit(folder, "cogvideo.yaml", SMALL, "parallel=ddp", ranks=1)
    trained = folder.run("cogvideo")
    assert sorted(path.suffix for path in (trained / "samples").iterdir()) == [".gif", ".gif", ".png", ".png"]

    making = "params={clips: 2, denoising_steps: 2}", f"params.run={trained}", f"params.vae={weights / 'vae'}"
    submit(folder, "cogvideo_sample.yaml", *making, ranks=1)
    made = folder.run("cogvideo_sample")
    assert status(made)["result"] == status(trained)["result"]
    clip = frames_of(made / "samples" / "000001.mp4")
    assert clip.shape == (9, 32, 48, 3) and clip.std() > 1
    with Image.open(made / "samples" / "000001.gif") as opened:
        assert opened.size == (50, 34) and len(list(ImageSequence.Iterator(opened))) == 9

    (made / "samples" / "text.safetensors").write_text("no latent")
    decoding = decode_video, made / "samples", tmp_path / "clips", "--weights", weights, "--tiling"
    assert "2 made, 0 already there, 1 broken" in here(*decoding)
    assert "0 made, 2 already there, 1 broken" in here(*decoding)
    assert "2 made, 0 already there, 1 broken" in here(*decoding, "--gif")
    assert "text.safetensors" in (tmp_path / "clips" / "broken.txt").read_text()
    with Image.open(tmp_path / "clips" / "000001.gif") as opened:
        assert opened.size == (48, 32) and len(list(ImageSequence.Iterator(opened))) == 9
    assert np.array_equal(frames_of(tmp_path / "clips" / "000001.mp4"), clip)
    latent = load_file(made / "samples" / "000001.safetensors")["latent"]
    vae = load_vae(weights / "vae", torch.device("cpu"), torch.float32, tiling=True)
    frames = decode(vae, latent).permute(0, 2, 3, 1).numpy()
    assert abs(clip.astype(float) - frames).mean() < 0.5 * frames.std()  # random colours, at half their resolution


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (torch.zeros(CHANNELS, 0, 4, 6), f"latent is {CHANNELS} x 0 x 4 x 6, expected {CHANNELS} x frames"),
        (torch.zeros(CHANNELS, 3, 0, 6), f"latent is {CHANNELS} x 3 x 0 x 6, expected {CHANNELS} x frames"),
        (torch.full(LATENT, torch.nan), f"latent has {CHANNELS * 72} of {CHANNELS * 72} values that are no numbers"),
        (torch.full(LATENT, torch.inf), f"latent has {CHANNELS * 72} of {CHANNELS * 72} values that are no numbers"),
    ],
)
def test_a_latent_that_cannot_be_watched_is_broken_and_the_others_are_decoded(
    bad: Tensor, says: str, weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    (tmp_path / "latents").mkdir()
    save_file({"latent": bad}, tmp_path / "latents" / "a.safetensors")
    save_file({"latent": torch.randn(LATENT)}, tmp_path / "latents" / "b.safetensors")
    said = here(decode_video, tmp_path / "latents", tmp_path / "clips", "--weights", weights)
    assert "1 made, 0 already there, 1 broken" in said and (tmp_path / "clips" / "b.mp4").exists()
    assert says in (tmp_path / "clips" / "broken.txt").read_text()


def without_memory(_: Tensor) -> Tensor:
    return torch.empty(1 << 50)


def with_a_broken_device(_: Tensor) -> Tensor:
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize(
    ("decode", "says"),
    [(without_memory, "fewer --workers take less"), (with_a_broken_device, "the same command continues")],
)
def test_a_latent_is_not_said_to_be_broken_where_the_device_is(
    decode: Callable[[Tensor], Tensor],
    says: str,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    save_file({"latent": torch.randn(LATENT)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(decode_video, "decoder_of", lambda *_: decode)
    monkeypatch.setattr(preparing, "in_processes", lambda function, items, *_: (function(item) for item in items))
    words = ["tool", tmp_path / "a.safetensors", tmp_path / "clips", "--weights", weights]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    assert decode_video.main() == 1 and says in capfd.readouterr().err
    assert not (tmp_path / "clips" / "broken.txt").exists()


def test_what_was_decoded_with_other_options_is_decoded_again(
    weights: Path, tmp_path: Path, here: Callable[..., str]
) -> None:
    (tmp_path / "latents").mkdir()
    save_file({"latent": torch.randn(LATENT)}, tmp_path / "latents" / "a.safetensors")
    decoding = decode_video, tmp_path / "latents", tmp_path / "clips", "--weights"
    copied = shutil.copytree(weights, tmp_path / "copied")
    other = shutil.copytree(weights, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text()) | {"scaling_factor": 0.7}
    (other / "vae" / "config.json").write_text(json.dumps(config))
    made = []
    for options in ([weights], [copied], [weights, "--fps", 16], [weights, "--fps", 16], [other, "--fps", 16]):
        made.append(here(*decoding, *options).partition(": ")[2].partition(" made")[0])
    assert made == ["1", "0", "1", "0", "1"]
    with av.open(str(tmp_path / "clips" / "a.mp4")) as container:
        assert container.streams.video[0].average_rate == 16


def test_fine_tuning_begins_with_the_published_weights_and_validates_by_clips_that_can_be_watched(
    weights: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_transformer().save_pretrained(tmp_path / "CogVideoX" / "transformer")
    (tmp_path / "CogVideoX" / "vae").symlink_to(weights / "vae")
    monkeypatch.setenv("COGVIDEO_DATA", str(prepared))
    monkeypatch.setenv("COGVIDEO_WEIGHTS", str(tmp_path / "CogVideoX"))
    folder = Folder(tmp_path / "folder", "cogvideo", "write_shown")
    refused = submit(folder, "cogvideo_finetune.yaml", SMALL, "params.start=nowhere", ranks=2, expect=2)
    assert "inputs: nowhere/config.json: no such file" in refused
    submit(folder, "cogvideo_finetune.yaml", SMALL, ranks=2)
    trained = folder.run("cogvideo_finetune")
    published = VideoTransformer(CHANNELS, FEATURES, dim=32, layers=2, heads=4, time=16, rescale=1.875)
    load_published(published, tmp_path / "CogVideoX" / "transformer")
    tuned = load_file(trained / "final" / "model.safetensors")
    changes = torch.cat([(tuned[name] - old).abs().flatten() for name, old in published.state_dict().items()])
    assert 0 < changes.max() < 2e-4  # three steps of AdamW at 2e-5, from there, in the parts of both ranks
    last = trained / "samples" / "step_00000003_0.mp4"
    assert sorted(path.name for path in last.parent.glob("step_00000003*")) == [
        "step_00000003.gif",
        "step_00000003.png",
        "step_00000003_0.mp4",
    ]
    assert frames_of(last).shape == (9, 32, 48, 3)
