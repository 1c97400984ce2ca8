"""A training in a world that fails. The file `weather` in the user's folder is that world: a test writes it.

{"kind": "read", "until": 1700000000.0}     the data server is away until then
{"kind": "device", "node": "node2"}         the device of rank 0's place on that node is sick
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

CODES = {"ecc": 214, "assert": 710}


def weather(*kinds: str) -> str | None:
    """The kind of fault, if it is one of these and there is one now, here."""
    try:
        now = json.loads(Path("weather").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    is_on = time.time() < now.get("until", float("inf"))
    is_here = now.get("node") in (None, os.environ.get("SLURMD_NODENAME"))
    return now["kind"] if is_on and is_here and now["kind"] in kinds else None


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 600

    def __getitem__(self, number: int) -> Any:
        match weather("read", "connection", "bucket"):
            case "read":
                raise OSError(errno.EIO, "Input/output error", "points.bin")
            case "connection":
                socket.create_connection(("127.0.0.1", 1), timeout=1)
            case "bucket":
                raise Exception("cannot reach the bucket")
        x = torch.full((4,), number / 600)
        return x, x.sin()


def wait_for_checkpoint(ctx: Any, step: int) -> None:
    """Wait until the checkpoint of this step is on the disk: a rank that fails does not wait for the thread."""
    while not (ctx.run_dir / "checkpoints" / f"step_{step:08d}").is_dir():
        time.sleep(0.02)


def train(ctx: Any) -> dict[str, Any]:
    p = ctx.params
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ctx.loader(Points(), global_batch_size=12, num_workers=p.workers)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(p.steps):
        time.sleep(0.02)
        loss = ctx.backward(model, next(loader), nn.functional.mse_loss)
        ctx.update(optimizer)
        if step == 100 and weather("typo"):
            wait_for_checkpoint(ctx, step)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "validatoin.bin")
        if weather("write"):
            raise OSError(errno.EIO, "Input/output error", "predictions.csv")
        if int(os.environ["LOCAL_RANK"]) == 0 and (kind := weather("device", *CODES)):
            error = torch.AcceleratorError("CUDA error") if kind in CODES else RuntimeError("CUDA error")
            error.error_code = CODES.get(kind)  # type: ignore[attr-defined]
            raise error
        ctx.log({"train/loss": loss})
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return {"loss": loss.item(), "weights": hashlib.sha256(b"".join(weights)).hexdigest()}
