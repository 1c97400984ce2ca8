"""Turn videos and captions into latents and text embeddings, as cogvideo.yaml reads them.

    python -m experiments.cogvideo.encode videos.jsonl $COGVIDEO_DATA --weights .../CogVideoX-2b [--part 1/8]

videos.jsonl has {"video": file, "text": caption} a line; the weights are a folder that diffusers wrote (vae,
text_encoder, tokenizer). It makes DST/<name>.safetensors unless the file is there, so the same command continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from experiments.cogvideo.codec import Autoencoder

FRAMES, FPS, HEIGHT, WIDTH, WORDS = 49, 8, 480, 720, 226
"""Of a clip; and tokens of its caption."""


def read_frames(file: Path, count: int = FRAMES, fps: int = FPS, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """The first `count` frames of a video at `fps` frames a second, uint8 [count, 3, height, width].

    ffmpeg scales a frame until it covers the size, and cuts around its middle. Raises ValueError for too short a video.
    """
    import av

    frames: list[Tensor] = []
    with av.open(file) as container:
        video, graph = container.streams.video[0], av.filter.Graph()
        cover = f"{width}:{height}:force_original_aspect_ratio=increase"
        filters = [graph.add("fps", str(fps)), graph.add("scale", cover), graph.add("crop", f"{width}:{height}")]
        graph.link_nodes(graph.add_buffer(template=video), *filters, graph.add("buffersink")).configure()
        for frame in chain(container.decode(video), [None]):  # None: the filters give what they hold back
            graph.vpush(frame)
            with suppress(BlockingIOError, EOFError):  # no frame is ready
                while len(frames) < count:
                    frames.append(torch.from_numpy(graph.vpull().to_ndarray(format="rgb24")).permute(2, 0, 1))
    if len(frames) < count:
        raise ValueError(f"found {len(frames)} frames at {fps} a second, expected {count}")
    return torch.stack(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description="Encode videos and captions to DST/<name>.safetensors.")
    parser.add_argument("source", type=Path, metavar="SRC", help='a .jsonl file, {"video": ..., "text": ...} a line')
    parser.add_argument("destination", type=Path, metavar="DST")
    parser.add_argument("--weights", type=Path, required=True, help="of CogVideoX-2b, as diffusers wrote them")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="part of the videos, for N processes")
    options = parser.parse_args()
    from transformers import AutoTokenizer, T5EncoderModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = Autoencoder(str(options.weights / "vae"), device)
    tokenizer = AutoTokenizer.from_pretrained(options.weights / "tokenizer", local_files_only=True)
    encoder = T5EncoderModel.from_pretrained(options.weights / "text_encoder", local_files_only=True).to(device)
    options.destination.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.part.split("/"))
    for line in options.source.read_text(encoding="utf-8").splitlines()[part - 1 :: parts]:
        clip = json.loads(line)
        target = options.destination / f"{Path(clip['video']).stem}.safetensors"
        if target.exists():
            continue
        try:
            latent = vae.encode(read_frames(options.source.parent / clip["video"]))
        except (OSError, ValueError) as error:
            print(f"{clip['video']}: left out: {error}", file=sys.stderr)
            continue
        # Padded, and padding not masked, as the published model was trained.
        padding = {"padding": "max_length", "max_length": WORDS, "truncation": True}
        with torch.no_grad():
            (text,) = encoder(tokenizer(clip["text"], return_tensors="pt", **padding).input_ids.to(device))[0]
        temporary = target.with_name(f".{target.name}")
        save_file({"latent": latent.cpu().contiguous(), "text": text.float().cpu()}, temporary)
        temporary.rename(target)


if __name__ == "__main__":
    main()
