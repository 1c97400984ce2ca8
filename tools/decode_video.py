"""Turn latents into videos that can be watched, by CogVideoX's video autoencoder.

    python tools/decode_video.py runs/cogvideo_sample-.../samples clips --weights .../CogVideoX-2b

makes DST/<name>.mp4 of each SRC/<name>.safetensors that holds a `latent` [16, T, H, W] of variance 1: of
experiments/cogvideo_sample.yaml, or of tools/prepare_video.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import preparing
import processes
from preparing import Done, Failure
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jobkit.run.files import content_digest, files_below, read_json, write_atomic, write_json
from jobkit.train.video import FRAMES_PER_SECOND, gif, mp4


@dataclass(frozen=True)
class Latent:
    """A latent's file, and what is to be made of it."""

    source: Path
    target: Path
    since: int
    """When the options became what they are, in ns: a video from before was made with others."""
    fps: int
    weights: Path
    precision: str
    tiling: bool


def watchable(latent: Latent) -> Done:
    """Decode a latent to a video; a file that holds none is reported and passed over."""
    newest = max(latent.source.stat().st_mtime_ns, latent.since)
    if latent.target.exists() and latent.target.stat().st_mtime_ns >= newest:
        return Done(kept=1)
    decoder = decoder_of(latent.weights, latent.precision, latent.tiling)
    try:
        with safe_open(latent.source, "pt") as opened:
            tensor = opened.get_tensor("latent")
        frames = decoder(tensor)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # torch's, of a size that it cannot decode
        if processes.is_of_device(error):
            raise
        return Done(broken=[(latent.source, preparing.reason(error)[:300])])
    latent.target.parent.mkdir(parents=True, exist_ok=True)
    data = gif(frames) if latent.target.suffix == ".gif" else mp4(frames, latent.fps)
    write_atomic(latent.target, data, durable=False)
    return Done(made=1)


@cache
def decoder_of(weights: Path, precision: str, tiling: bool) -> Callable[[Tensor], Tensor]:
    """What makes frames of a latent, on this process's device."""
    sys.path.append(str(Path(__file__).parents[1]))  # from wherever this is called
    from experiments.cogvideo.decoder import decode, load_vae

    vae = load_vae(weights / "vae", processes.device, processes.PRECISIONS[precision], tiling)
    return partial(decode, vae)


def keep_options(file: Path, fps: int, weights: Path, precision: str, tiling: bool) -> int:
    """Write down how videos are made, unless that is what the file says already: when it was written, in ns."""
    vae = [content_digest(one) for one in preparing.weights_in(weights / "vae", ".json")]
    options = {"fps": fps, "vae": vae, "precision": precision, "tiling": tiling}
    if read_json(file) != options:
        write_json(file, options, durable=False)
    return file.stat().st_mtime_ns


def prepare(arguments: argparse.Namespace, console: Console) -> tuple[Done, Path, Path]:
    """Decode all latents: what was done, where, and where broken ones are to be listed."""
    processes.check_packages("av", "diffusers", "PIL")
    source, destination = arguments.source, arguments.destination
    processes.check_folder(arguments.weights, "vae/config.json")
    root = source.parent if source.is_file() else source
    files = [source] if source.is_file() else []
    if source.is_dir():
        files = sorted(file for file in files_below(source) if file.suffix == ".safetensors")
    if not files:
        raise Failure(f"{source}: no .safetensors files in it, as cogvideo_sample.yaml writes to samples/")
    preparing.check_writable(destination)
    suffix = ".gif" if arguments.gif else ".mp4"
    how = arguments.fps, arguments.weights, arguments.precision, arguments.tiling
    since = keep_options(destination / f".options{suffix}.json", *how)
    latents = [Latent(file, destination / file.relative_to(root).with_suffix(suffix), since, *how) for file in files]
    done = processes.spread(watchable, latents, "latents", arguments.workers, arguments.devices, console)
    return done, destination, destination / "broken.txt"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Decode latents to DST/<name>.mp4, in parallel.",
        epilog="The same command continues an interrupted run: videos that are there already, newer than their latents "
        "and of the same options, are not made again. " + preparing.EXIT_CODES,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of .safetensors files, or one of them")
    parser.add_argument("destination", type=Path, metavar="DST", help="folder of the videos")
    parser.add_argument("--fps", type=int, default=FRAMES_PER_SECOND, help="frames a second of an mp4 (default: 8)")
    parser.add_argument("--gif", action="store_true", help="animated GIFs instead, of 8 frames a second")
    processes.add_options(parser, "vae")
    arguments = processes.parse(parser)
    if arguments.fps < 1:
        parser.error(f"--fps: found {arguments.fps}, expected 1 or more")
    return arguments


def main() -> int:
    """Exit code of the program."""
    arguments = parse_arguments()
    return preparing.main("decode_video", lambda console: prepare(arguments, console))


if __name__ == "__main__":
    sys.exit(main())
