"""Videos as bytes that browsers and TensorBoard show."""

from __future__ import annotations

import io

from torch import Tensor

FRAME_MILLISECONDS = 125
FRAMES_PER_SECOND = 1000 // FRAME_MILLISECONDS


def gif(video: Tensor) -> bytes:
    """An endless animated GIF of uint8 frames [T, C, H, W], of one (grey) or three (RGB) channels; needs Pillow.

    A GIF has 256 colours and counts in hundredths of a second; a frame that equals the one before prolongs it.
    """
    from PIL import Image

    frames = [Image.fromarray(frame.squeeze(-1).numpy()) for frame in video.cpu().permute(0, 2, 3, 1)]
    file = io.BytesIO()
    frames[0].save(file, format="gif", save_all=True, append_images=frames[1:], duration=FRAME_MILLISECONDS, loop=0)
    return file.getvalue()


def mp4(video: Tensor, frames_per_second: int = FRAMES_PER_SECOND) -> bytes:
    """An H.264 MP4 of uint8 frames [T, 3, H, W], which browsers and players take; needs PyAV (`av`).

    H and W must be even: colours are stored at half the resolution. Raises ValueError where they are not.
    """
    import av

    height, width = video.shape[2:]
    if height % 2 or width % 2:
        raise ValueError(f"frames of {height} x {width} pixels: an MP4's height and width are even")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=frames_per_second, options={"crf": "17"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in video.cpu().permute(0, 2, 3, 1).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
