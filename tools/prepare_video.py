"""Turn videos and captions into latents and text embeddings, as experiments/cogvideo.yaml reads them.

    python tools/prepare_video.py .../videos $COGVIDEO_DATA --weights .../CogVideoX-2b

makes DST/<video>.safetensors, each with `latent` [16, 13, 60, 90] of CogVideoX's video autoencoder, times its scaling
factor, and `text` [226, 4096] of T5; the weights are a folder that diffusers wrote (DIR/vae, DIR/text_encoder,
DIR/tokenizer). The latent is drawn from the encoder's distribution, as in CogVideo's training, by random numbers that
follow from the video's name: a second run makes the same. tools/decode_video.py is the way back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import preparing
import processes
import torch
import videos
from preparing import Done, Failure
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from jobkit import JobkitError
from jobkit.run.files import content_digest, files_below, write_atomic

SAMPLE = 1 << 16
"""Bytes of T5's weights that are looked at together."""


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a file, besides its video and caption."""

    frames: int
    fps: int
    height: int
    width: int
    skip: int
    words: int
    precision: str
    tiling: bool
    weights: str
    """A digest, as of `digest_of`."""


OF_VIDEO = ("bytes", "modified", "sha256")
"""What a file says of the video's own file: its length, when it was written, in ns, and a digest of its content."""


@dataclass(frozen=True)
class Clip:
    """A video to be encoded: where it goes, and where the embedding of its caption is."""

    video: videos.Video
    target: Path
    text: Path
    weights: Path
    settings: Settings

    def made_from(self) -> dict[str, Any] | None:
        """What the file says that it was made of; None where none of this tool's is there, or not all of it."""
        return made_from(self.target)

    def about(self) -> dict[str, Any]:
        """What its file says besides OF_VIDEO: one that says else is made again."""
        of = self.video
        return {"source": str(of.origin), "video": of.name, "caption": of.caption} | asdict(self.settings)

    def is_of_it(self, made_of: dict[str, Any] | None) -> bool:
        """Whether the file was made of a video of this name, as asked; the source may have been moved since."""
        said = {key: value for key, value in (made_of or {}).items() if key not in OF_VIDEO}
        return said | {"source": str(self.video.origin)} == self.about()

    def is_as_asked(self, made_of: dict[str, Any] | None, *, reads: bool = False) -> bool:
        """Whether the file was made of this video as it is now: of that length, and written then or, where the video
        may be read, of that content."""
        if made_of is None or not self.is_of_it(made_of):
            return False
        state = self.video.path.stat()
        if state.st_size != made_of.get("bytes"):
            return False
        is_of_then = state.st_mtime_ns == made_of.get("modified")
        return is_of_then or (reads and content_digest(self.video.path) == made_of.get("sha256"))

    def refusal(self, made_of: dict[str, Any] | None) -> str | None:
        """Why the file cannot be made, or None: it is of another source's video of this name."""
        other = other_source(made_of, self.video.origin)
        return other and f"{self.target} is of a video of this name in {other}: give this source a DST of its own"

    def set_aside(self, why: str) -> str:
        """`why` a video cannot be had, after what was made of it before has got a name that is not trained on."""
        if self.refusal(self.made_from()) or not self.target.exists():
            return why
        names = (self.target.with_name(f"{self.target.name}.set_aside{number or ''}") for number in count())
        aside = next(path for path in names if not path.exists())
        self.target.rename(aside)
        return f"{why}; what was made of it before is now {aside}, and not trained on"


def made_from(path: Path) -> dict[str, Any] | None:
    """What a clip's file says that it was made of; None where it is none of this tool's, or not whole."""
    try:
        found = json.loads(says(path) or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def other_source(made_of: dict[str, Any] | None, origin: Path) -> str | None:
    """The source that a file was made of, where that is another one than `origin`, and still there."""
    source = str((made_of or {}).get("source", origin))
    return source if source != str(origin) and is_there(source) else None


@cache
def is_there(source: str) -> bool:
    """Whether a source is there; one that may not be looked at is."""
    try:
        return Path(source).exists()
    except OSError:
        return True


def says(path: Path) -> str | None:
    """What a safetensors file says that it was made of; None where there is no such file, or not all of it."""
    try:
        with safe_open(path, "pt") as opened:  # which compares the file's length with what its header says
            return (opened.metadata() or {}).get("made_of")
    except (OSError, SafetensorError):
        return None


def embed(clip: Clip) -> Done:
    """Make the embedding of a caption [words, features] unless it is there."""
    if says(clip.text) is not None:
        return Done(kept=1)
    tokenizer, encoder = text_encoder(clip.weights, clip.settings.precision)
    # Padded, and padding not masked, as the published model was trained.
    words = clip.settings.words
    ids = tokenizer(clip.video.caption, padding="max_length", max_length=words, truncation=True, return_tensors="pt")
    with torch.no_grad():
        (text,) = encoder(ids.input_ids.to(encoder.device))[0]
    write(clip.text, {"text": text}, clip.video.caption)
    return Done(made=1)


def encode(clip: Clip) -> Done:
    """Make the file of a clip; a video that cannot be read is reported and passed over."""
    of = clip.settings
    try:
        before = clip.video.path.stat()
        if clip.is_as_asked(clip.made_from(), reads=True):  # or by another process, since this one looked
            return Done(kept=1)
        digest = content_digest(clip.video.path)
        frames = videos.read_frames(clip.video.path, of.frames, of.fps, (of.height, of.width), of.skip)
        after = clip.video.path.stat()
    except Exception as error:  # a decoder may raise anything for a file that is no video
        return Done(broken=[(clip.video.path, clip.set_aside(preparing.reason(error)))])
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        why = "written while it was read, as by a copy that goes on; the same command once it is whole"
        return Done(broken=[(clip.video.path, clip.set_aside(why))])
    vae = autoencoder(clip.weights, of.precision, of.tiling)
    pixels = (frames.to(vae.device, torch.float32) / 127.5 - 1).to(vae.dtype)
    with torch.no_grad():
        drawn = vae.encode(pixels.transpose(0, 1)[None]).latent_dist.sample(generator=random(clip.video.name))
    with safe_open(clip.text, "pt") as opened:
        text = opened.get_tensor("text")
    if refusal := clip.refusal(clip.made_from()):  # another command's, since this one looked
        return Done(broken=[(clip.video.path, refusal)])
    of_video = dict(zip(OF_VIDEO, (before.st_size, before.st_mtime_ns, digest), strict=True))
    made_of = json.dumps(clip.about() | of_video, sort_keys=True)
    write(clip.target, {"latent": drawn[0] * vae.config.scaling_factor, "text": text}, made_of)
    return Done(made=1)


def random(name: str) -> torch.Generator:
    """Random numbers that follow from a name."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:7], "big"))


def write(path: Path, tensors: dict[str, Tensor], made_of: str) -> None:
    """Write a safetensors file whole, which says what it was made of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(whole, metadata={"made_of": made_of}), durable=False)


@cache
def autoencoder(weights: Path, precision: str, tiling: bool) -> Any:
    """The video autoencoder, on this process's device."""
    sys.path.append(str(Path(__file__).parents[1]))  # from wherever this is called
    from experiments.cogvideo.decoder import load_vae

    return load_vae(weights / "vae", processes.device, processes.PRECISIONS[precision], tiling)


@cache
def text_encoder(weights: Path, precision: str) -> tuple[Any, Any]:
    """The tokenizer and T5's encoder, on this process's device."""
    from transformers import AutoTokenizer, T5EncoderModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = processes.PRECISIONS[precision]
    try:
        tokenizer = AutoTokenizer.from_pretrained(weights / "tokenizer", local_files_only=True)
        encoder = T5EncoderModel.from_pretrained(weights / "text_encoder", dtype=dtype, local_files_only=True)
    except Exception as error:  # whatever is wrong with the folders
        raise JobkitError(f"{weights}: no T5 can be loaded from it: {preparing.reason(error)[:300]}") from error
    return tokenizer, encoder.to(processes.device).eval()


def find_clips(arguments: argparse.Namespace, settings: Settings, found: list[videos.Video]) -> tuple[list[Clip], Done]:
    """The clips of this part that are still to be made; and what is there already, and what has no file or caption."""
    part, parts = arguments.part
    missing, kept, broken = [], 0, []
    for video in found[part - 1 :: parts]:
        key = json.dumps([video.caption, settings.words, settings.precision, settings.weights])
        text = arguments.destination / ".texts" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
        clip = Clip(video, target_of(video, arguments.destination), text, arguments.weights, settings)
        made_of = clip.made_from()
        if not video.path.exists():
            is_of_it = clip.is_of_it(made_of)
            broken.append((video.path, "no such file" if is_of_it else clip.set_aside("no such file")))
        elif video.caption is None:
            broken.append((video.path, clip.set_aside("no caption")))
        elif refusal := clip.refusal(made_of):
            broken.append((video.path, refusal))
        elif clip.is_as_asked(made_of):  # one that is only dated anew is read by the processes
            kept += 1
        else:
            missing.append(clip)
    return missing, Done(0, kept, broken)


def target_of(video: videos.Video, destination: Path) -> Path:
    """Where a video's latent goes."""
    return destination / f"{video.name}.safetensors"


def tell_left_over(found: list[videos.Video], destination: Path) -> None:
    """Say which latents of videos that are no longer in the source are still trained on, and list them in a file."""
    known, origin = {target_of(video, destination) for video in found}, found[0].origin
    others = sorted(
        path
        for path in files_below(destination)
        if path.suffix == ".safetensors" and path not in known
        if (made_of := made_from(path)) is not None and not other_source(made_of, origin)
    )
    listed = destination / "left_over.txt"
    if not others:
        listed.unlink(missing_ok=True)  # of an earlier run
        return
    write_atomic(listed, preparing.as_lines(others), durable=False)
    print(
        f"prepare_video: {len(others):,} in {destination} of videos that the source does not have any more, such as "
        f"{others[0].relative_to(destination)}: they are trained on, too, until you remove them (all listed in "
        f"{listed})",
        file=sys.stderr,
    )


def prepare(arguments: argparse.Namespace, console: Console) -> tuple[Done, Path, Path]:
    """Encode all captions, then all videos: what was done, where, and where broken ones are to be listed."""
    processes.check_packages("av", "diffusers", "PIL", "sentencepiece", "transformers")
    options = {name: getattr(arguments, name) for name in Settings.__dataclass_fields__ if name != "weights"}
    check_weights(arguments.weights, arguments.frames, {"height": arguments.height, "width": arguments.width})
    settings = Settings(**options, weights=digest_of(arguments.weights))
    try:
        os.fsencode(arguments.destination).decode()
    except UnicodeDecodeError:
        raise Failure(f"{arguments.destination}: no UTF-8, and safetensors opens no file there; another DST") from None
    try:
        with console.status(f"looking for videos in {arguments.source}"):
            found = videos.find_videos(arguments.source)
            preparing.check_writable(arguments.destination)
            clips, done = find_clips(arguments, settings, found)
    except OSError as error:
        raise Failure(f"{error.filename}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Failure(f"{arguments.source}: no UTF-8 text: {error}") from None
    captions = list({clip.text: clip for clip in clips}.values())
    # The two models one after the other: T5 alone is of 9.5 GB. On a CPU it is one process's, with all of the cores.
    one = 1 if arguments.devices == ["cpu"] else arguments.workers
    processes.spread(embed, captions, "captions", one, arguments.devices, console)
    done += processes.spread(encode, clips, "videos", arguments.workers, arguments.devices, console)
    with console.status(f"looking for latents of other videos in {arguments.destination}"):
        tell_left_over(found, arguments.destination)
    part, parts = arguments.part
    report = "broken.txt" if parts == 1 else f"broken_{part}_of_{parts}.txt"
    return done, arguments.destination, arguments.destination / report


def digest_of(weights: Path) -> str:
    """16 hex digits of the autoencoder, settings and weights, of the tokenizer, and of T5's settings and samples of its
    weights.

    T5 is 20 times as large: of each of its files 64 KiB are read every 16 MiB, less than one of its matrices.
    """
    found = hashlib.sha256((weights / "text_encoder" / "config.json").read_bytes())
    for file in preparing.weights_in(weights / "text_encoder"):
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in (*range(0, size, 1 << 24), max(0, size - SAMPLE)):
                opened.seek(place)
                found.update(opened.read(SAMPLE))
    tokenizer = sorted(file for file in (weights / "tokenizer").iterdir() if file.is_file())
    for file in (*preparing.weights_in(weights / "vae", ".json"), *tokenizer):
        found.update(content_digest(file).encode())
    return found.hexdigest()[:16]


def check_weights(weights: Path, frames: int, sides: dict[str, int]) -> None:
    """Failure where a model's folder is missing, or the size is none of its sizes."""
    processes.check_folder(weights, "vae/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json")
    try:
        vae = json.loads((weights / "vae" / "config.json").read_text(encoding="utf-8"))
        times, space = vae["temporal_compression_ratio"], 2 ** len(vae["block_out_channels"])
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(f"{weights}/vae/config.json: not AutoencoderKLCogVideoX's: {preparing.reason(error)}") from None
    if frames % times != 1:
        raise Failure(f"--frames: found {frames}, expected a multiple of {times} and one more, as 49")
    for side, found in sides.items():  # the autoencoder halves them for each of its levels but one, a patch once more
        if found % space:
            raise Failure(f"--{side}: found {found}, expected a multiple of {space}")


def part(text: str) -> tuple[int, int]:
    """I/N as (I, N)."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"found {text}, expected I/N with I from 1 to N, as 2/4")
    return int(number), int(of)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Encode videos and captions to DST/<video>.safetensors (latent, text), in parallel.",
        epilog="The same command continues an interrupted run: files that are there already, of the same caption and "
        "options, are not made again. " + preparing.EXIT_CODES,
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="videos.txt and prompts.txt; or videos/*.mp4 and labels/*.txt; or a .jsonl or .csv file of video, caption",
    )
    parser.add_argument("destination", type=Path, metavar="DST", help="what COGVIDEO_DATA is to be")
    processes.add_options(parser, "vae, text_encoder and tokenizer")
    parser.add_argument("--frames", type=int, default=49, help="of a clip (default: 49)")
    parser.add_argument("--fps", type=int, default=8, help="frames a second (default: 8)")
    parser.add_argument("--height", type=int, default=480, help="pixels (default: 480)")
    parser.add_argument("--width", type=int, default=720, help="pixels (default: 720)")
    parser.add_argument("--skip", type=int, default=3, help="frames passed over at both ends (default: 3)")
    parser.add_argument("--words", type=int, default=226, help="tokens of a caption (default: 226)")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="part of the videos, for N machines")
    arguments = processes.parse(parser)
    for option in ("frames", "fps", "height", "width", "words"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option}: found {getattr(arguments, option)}, expected 1 or more")
    if arguments.skip < 0:
        parser.error(f"--skip: found {arguments.skip}, expected 0 or more")
    return arguments


def main() -> int:
    """Exit code of the program."""
    arguments = parse_arguments()
    return preparing.main("prepare_video", lambda console: prepare(arguments, console))


if __name__ == "__main__":
    sys.exit(main())
