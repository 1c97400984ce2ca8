"""Videos as bytes that browsers and TensorBoard show."""

from __future__ import annotations

import io

from torch import Tensor

FRAME_MILLISECONDS = 125


def gif(video: Tensor) -> bytes:
    """An endless animated GIF of uint8 frames [T, C, H, W], of one (grey) or three (RGB) channels; needs Pillow.

    A GIF has 256 colours and counts in hundredths of a second; a frame that equals the one before prolongs it.
    """
    from PIL import Image

    frames = [Image.fromarray(frame.squeeze(-1).numpy()) for frame in video.cpu().permute(0, 2, 3, 1)]
    file = io.BytesIO()
    frames[0].save(file, format="gif", save_all=True, append_images=frames[1:], duration=FRAME_MILLISECONDS, loop=0)
    return file.getvalue()
