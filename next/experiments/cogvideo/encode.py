"""Turn videos and captions into latents and text embeddings, as cogvideo.yaml reads them.

    python -m experiments.cogvideo.encode videos.jsonl $COGVIDEO_DATA --weights .../CogVideoX-2b [--part 1/8]

videos.jsonl has {"video": file, "text": caption} a line; the weights are a folder that diffusers wrote (vae,
text_encoder, tokenizer). It makes DST/<name>.safetensors unless the file is there, so the same command continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from experiments.cogvideo.codec import Autoencoder


def read_frames(file: Path, count: int, fps: int, height: int, width: int) -> Tensor:
    """The first `count` frames of a video at `fps` frames a second, uint8 [count, 3, height, width].

    A frame is enlarged or reduced until it covers the size, and cut around its middle. Raises ValueError for a video
    that is too short.
    """
    import av

    frames: list[Tensor] = []
    with av.open(file) as container:
        for frame in container.decode(video=0):
            while frame.time is not None and frame.time >= len(frames) / fps and len(frames) < count:
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1))
            if len(frames) == count:
                break
    if len(frames) < count:
        raise ValueError(f"{len(frames)} frames at {fps} a second, expected {count}")
    video = torch.stack(frames).float()
    scale = max(height / video.shape[2], width / video.shape[3])
    size = [max(height, round(video.shape[2] * scale)), max(width, round(video.shape[3] * scale))]
    video = F.interpolate(video, size, mode="bilinear", antialias=True)
    top, side = (size[0] - height) // 2, (size[1] - width) // 2
    return video[:, :, top : top + height, side : side + width].round().clamp(0, 255).to(torch.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description="Encode videos and captions to DST/<name>.safetensors.")
    parser.add_argument("source", type=Path, metavar="SRC", help='a .jsonl file, {"video": ..., "text": ...} a line')
    parser.add_argument("destination", type=Path, metavar="DST")
    parser.add_argument("--weights", type=Path, required=True, help="of CogVideoX-2b, as diffusers wrote them")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="part of the videos, for N processes")
    for name, default in {"frames": 49, "fps": 8, "height": 480, "width": 720, "words": 226}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args()
    from transformers import AutoTokenizer, T5EncoderModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = Autoencoder(str(options.weights / "vae"), device)
    tokenizer = AutoTokenizer.from_pretrained(options.weights / "tokenizer", local_files_only=True)
    encoder = T5EncoderModel.from_pretrained(options.weights / "text_encoder", local_files_only=True).to(device)
    options.destination.mkdir(parents=True, exist_ok=True)
    number, parts = map(int, options.part.split("/"))
    failures = 0
    for line in options.source.read_text(encoding="utf-8").splitlines()[number - 1 :: parts]:
        clip = json.loads(line)
        target = options.destination / f"{Path(clip['video']).stem}.safetensors"
        if target.exists():
            continue
        # Padded, and padding not masked, as the published model was trained.
        padding = {"padding": "max_length", "max_length": options.words, "truncation": True}
        ids = tokenizer(clip["text"], return_tensors="pt", **padding).input_ids.to(device)
        try:
            size = (options.frames, options.fps, options.height, options.width)
            latent = vae.encode(read_frames(options.source.parent / clip["video"], *size))
        except (OSError, ValueError) as error:
            print(f"{clip['video']}: {error}", file=sys.stderr)
            failures += 1
            continue
        with torch.no_grad():
            (text,) = encoder(ids)[0]
        temporary = target.with_name(f".{target.name}")
        save_file({"latent": latent.cpu().contiguous(), "text": text.float().cpu()}, temporary)
        temporary.rename(target)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
