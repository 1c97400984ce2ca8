"""Videos and their captions, in the forms that CogVideo's own tools take, and the frames of a video.

    SRC/videos.txt, SRC/prompts.txt     a path and a caption a line (finetune/: --video_column, --caption_column)
    SRC/videos/*.mp4, SRC/labels/*.txt  a caption is the first line of the file of its name (sat/); it may also lie
                                        beside its video
    SRC.jsonl, SRC.csv                  {"video": path, "caption": text} a line, or columns of these names

Paths in a list are relative to the folder of the list.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from preparing import Failure
from torch import Tensor
from torch.nn import functional as F

from jobkit.run.files import files_below

if TYPE_CHECKING:
    import av

SUFFIXES = (".mp4", ".avi", ".m4v", ".mkv", ".mov", ".webm")
PROMPTS = ("prompts.txt", "prompt.txt")
"""CogVideo's guide has the first name, its scripts the second."""
ENCODING = "utf-8-sig"
"""UTF-8; the mark that editors on Windows put before it is no part of a caption."""
ROUNDED = 0.002
"""Seconds by which a container may have rounded a frame's time."""


@dataclass(frozen=True)
class Video:
    """A video, its caption (None if it has none), a name of its own, and the folder in which it has that name.

    The name is a path without `..`, without dots at the beginning of its parts, and without a suffix; a byte that is no
    UTF-8 stands in it as %E9, since safetensors opens no such file.
    """

    path: Path
    caption: str | None
    name: str
    origin: Path


def find_videos(source: Path) -> list[Video]:
    """All videos of a folder or of a list, by name; Failure where it is none of the forms above."""
    if source.is_file() and source.suffix in (".jsonl", ".csv"):
        try:
            found, root = list(_listed(source)), source.parent
        except csv.Error as error:
            raise Failure(f"{source}: no CSV: {error}") from None
    elif not source.is_dir():
        raise Failure(f"{source}: no such folder, .jsonl or .csv file; SRC holds videos and captions, see --help")
    else:
        found, root = list(_paired(source) if (source / "videos.txt").exists() else _walked(source)), source
    if not found:
        raise Failure(f"{source}: no videos in it, expected videos.txt and prompts.txt, or {', '.join(SUFFIXES)} files")
    origin = root.resolve()
    videos = [Video(path, caption or None, _name(path, root), origin) for path, caption in found]
    names: dict[str, Path] = {}
    for video in videos:
        if video.name in names:
            raise Failure(f"{source}: {video.path} and {names[video.name]}: a name is one video's, with one caption")
        names[video.name] = video.path
    return sorted(videos, key=lambda video: video.name)


def _name(path: Path, root: Path) -> str:
    relative = Path(os.path.relpath(path, root))
    below = path.resolve().relative_to("/") if relative.parts[0] == ".." else relative
    # The training takes what begins with a dot for a file that is being written, or for .texts.
    shown = (f"_{part}" if part.startswith(".") else part for part in below.with_suffix("").parts)
    return re.sub("[\udc80-\udcff]", lambda byte: f"%{ord(byte[0]) - 0xDC00:02X}", str(Path(*shown)))


def _listed(source: Path) -> Iterator[tuple[Path, str]]:
    with source.open(encoding=ENCODING, newline="") as lines:
        rows = csv.DictReader(lines) if source.suffix == ".csv" else _json_lines(source, lines)
        for row in rows:
            number = rows.line_num if isinstance(rows, csv.DictReader) else row.pop(None)
            if None in row:  # a caption would end at its first comma
                raise Failure(f"{source}:{number}: more fields than columns; a text with a comma in it is in quotes")
            video, caption = row.get("video"), row.get("caption") or ""
            if not isinstance(video, str) or not video or not isinstance(caption, str):
                keys = ", ".join(str(key) for key in row)
                raise Failure(f"{source}:{number}: found {keys or 'nothing'}, expected a video and a caption")
            yield source.parent / _path(video), caption.strip()


def _json_lines(source: Path, lines: Iterable[str]) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise Failure(f"{source}:{number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise Failure(f'{source}:{number}: found {line.strip()[:80]}, expected {{"video": path, "caption": text}}')
        yield row | {None: number}


def _paired(source: Path) -> Iterator[tuple[Path, str]]:
    prompts = next((source / name for name in PROMPTS if (source / name).exists()), None)
    if prompts is None:
        raise Failure(f"{source}: videos.txt is there and prompts.txt is not; each of its lines is a video's caption")
    videos, captions = (_lines_of(file) for file in (source / "videos.txt", prompts))
    if len(videos) != len(captions):
        raise Failure(f"{prompts}: {len(captions)} captions, expected {len(videos)}: videos.txt has so many lines")
    for video, caption in zip(videos, captions, strict=True):
        yield source / _path(video), caption


def _path(text: str) -> Path:
    """A name in a list, which is UTF-8, as the file system's: the locale of a machine may be another."""
    return Path(os.fsdecode(text.encode()))


def _lines_of(file: Path) -> list[str]:
    r"""The lines of a text, which "\n" ends and nothing else; Failure names one that is empty between others."""
    lines = [line.strip() for line in _text_of(file).rstrip().split("\n")]
    if lines == [""]:
        return []
    for number, line in enumerate(lines, start=1):
        if not line:
            raise Failure(f"{file}:{number}: an empty line; a line is needed for each video, as captions are counted")
    return lines


def _walked(source: Path) -> Iterator[tuple[Path, str]]:
    for path in files_below(source):
        if path.suffix.lower() in SUFFIXES:
            yield path, _label(source, path)


def _label(source: Path, video: Path) -> str:
    parts = ["labels" if part == "videos" else part for part in video.relative_to(source).parts]
    for file in (source.joinpath(*parts).with_suffix(".txt"), video.with_suffix(".txt")):
        if file.exists():
            return _text_of(file).strip().partition("\n")[0].strip()
    return ""


def _text_of(file: Path) -> str:
    """What is in a file; Failure where that is no UTF-8."""
    try:
        return file.read_bytes().decode(ENCODING)
    except UnicodeDecodeError as error:
        raise Failure(f"{file}: no UTF-8 text: {error}") from None


def read_frames(path: Path, count: int, per_second: int, size: tuple[int, int], skip: int) -> Tensor:
    """`count` frames of a video, uint8 [count, 3, height, width], `per_second` of each second from its beginning.

    As CogVideo's SFTDataset (sat/) does: the first and the last `skip` frames are passed over, for transitions; a video
    that is too short has its frames taken from all of its length, evenly, and repeats the last if it has fewer; a frame
    is scaled (bicubic) until it covers the size, and its middle is taken. Frames are chosen by their times, so a
    varying frame rate is no matter. Memory is for `count` frames of the size.

    Raises whatever a decoder finds wrong, and ValueError for a video without frames.
    """
    pictures, there = _pictures(path, size, skip, partial(_at_times, count=count, per_second=per_second))
    if not there:
        raise ValueError(f"at most {2 * skip} frames in it; the first and the last {skip} are passed over")
    if len(pictures) < count:
        numbers = {k * there // count for k in range(count)} if there > count else set(range(there))
        pictures, _ = _pictures(path, size, skip, partial(_of_numbers, numbers=numbers))
    return torch.stack(pictures + pictures[-1:] * (count - len(pictures)))


Frames = Iterator[tuple[float, "av.VideoFrame"]]
"""Frames, each with its time in seconds."""


def _pictures(
    path: Path, size: tuple[int, int], skip: int, choose: Callable[[Frames], Iterator[av.VideoFrame]]
) -> tuple[list[Tensor], int]:
    """The frames of a video that are chosen, [3, height, width] each, and how many were looked at."""
    import av  # an extra, which a list is read without

    pictures: list[Tensor] = []
    looked_at = 0

    def counted(frames: Frames) -> Frames:
        nonlocal looked_at
        for looked_at, frame in enumerate(frames, start=1):  # noqa: B007
            yield frame

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("no video in it")
        last = None
        for frame in choose(counted(_trimmed(_timed(container), skip))):
            pictures.append(pictures[-1] if frame is last else _fitted(frame, size))
            last = frame
    return pictures, looked_at


def _timed(container: av.container.InputContainer) -> Frames:
    stream = container.streams.video[0]
    rate = float(stream.average_rate or 25)
    for number, frame in enumerate(container.decode(stream)):
        yield number / rate if frame.time is None else frame.time, frame


def _trimmed(frames: Frames, skip: int) -> Frames:
    waiting: deque[tuple[float, av.VideoFrame]] = deque()
    for number, frame in enumerate(frames):
        if number >= skip:
            waiting.append(frame)
        if len(waiting) > skip:
            yield waiting.popleft()


def _at_times(frames: Frames, count: int, per_second: int) -> Iterator[av.VideoFrame]:
    """The frame that is shown at each of `count` times; fewer where the video ends before."""
    shown, begin, taken = None, 0.0, 0
    for time, frame in frames:
        if shown is None:
            begin = time
        while shown is not None and taken < count and begin + taken / per_second < time - ROUNDED:
            yield shown
            taken += 1
        if taken == count:
            return
        shown = frame
    if shown is not None and taken < count:
        yield shown


def _of_numbers(frames: Frames, numbers: set[int]) -> Iterator[av.VideoFrame]:
    return (frame for number, (_, frame) in enumerate(frames) if number in numbers)


def _fitted(frame: av.VideoFrame, size: tuple[int, int]) -> Tensor:
    picture = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    picture = torch.rot90(
        picture, round(frame.rotation / 90) % 4, (1, 2)
    )  # a telephone's: the file says how it is held
    height, width = picture.shape[1:]
    scale = max(size[0] / height, size[1] / width)
    covering = max(size[0], round(height * scale)), max(size[1], round(width * scale))
    if (height, width) != covering:
        picture = F.interpolate(picture[None].float(), covering, mode="bicubic", antialias=True)[0]
        picture = picture.round().clamp(0, 255).to(torch.uint8)
    top, left = (covering[0] - size[0]) // 2, (covering[1] - size[1]) // 2
    return picture[:, top : top + size[0], left : left + size[1]].contiguous()
