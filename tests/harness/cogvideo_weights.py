"""A small random CogVideoX in the folder that diffusers writes, and small videos."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import sentencepiece
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from transformers import T5Config, T5EncoderModel

CHANNELS, FEATURES, WORDS = 4, 12, 16
CAPTIONS = ("a red ball falls", "a blue square moves to the right", "the green field", "a cat runs")


def write_encoders(folder: Path) -> Path:
    """vae, of 8 x 8 pixels and 4 frames a position, text_encoder, of T5, and tokenizer, a SentencePiece model."""
    torch.manual_seed(0)
    AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        sample_height=96,
        sample_width=80,  # tiles of 6 x 5 positions: the fewest that overlap by whole ones
    ).save_pretrained(folder / "vae")
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CAPTIONS * 20),
        model_writer=pieces,
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "spiece.model").write_bytes(pieces.getvalue())
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    T5EncoderModel(
        T5Config(vocab_size=64, d_model=FEATURES, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(folder / "text_encoder")
    return folder


def small_transformer(**changes: object) -> CogVideoXTransformer3DModel:
    """The published transformer, small, and with random numbers in all that would be 0 or 1."""
    torch.manual_seed(1)
    options = {
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "time_embed_dim": 16,
        "text_embed_dim": FEATURES,
        "num_layers": 2,
        "sample_width": 6,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": WORDS,
    }
    model = CogVideoXTransformer3DModel(**options | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_video(path: Path, frames: int, size: tuple[int, int] = (48, 64), per_second: int = 8) -> None:
    """A video of at most 50 grey frames, each lighter than the one before, with a bright edge on the left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=per_second, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            picture = np.full((*size, 3), 40 + 4 * number, np.uint8)
            picture[:, :4] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
