"""A run directory as two attempts, one of which was killed, leave it; every text in it may be a hostile one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from jobkit.run.journal import encode
from jobkit.run.rundir import RunDir
from jobkit.run.yamlfile import dump
from jobkit.worker.metrics import MetricLog

BEGAN = 1_700_000_000.0
"""When it was submitted, in seconds since the epoch."""


def made_run(path: Path, text: str = "plain", *, steps: int = 100, lr: float = 0.1, state: str = "failed") -> RunDir:
    """Steps up to 60, killed; again from 40 on, to the end in `state`. `text` stands wherever a run may hold a text."""
    run = RunDir(path)
    run.tensorboard.mkdir(parents=True)
    params = {"lr": lr, "steps": steps, f"p{text}": text}
    run.config_file.write_text(dump({"name": "made", "task": "mytask:train", "params": params, "seed": 0}))
    failure = {
        "error": f"ValueError: {text}",
        "rank": 3,
        "step": 77,
        "node": text,
        "samples": list(range(100)),
        "traceback": f"Traceback (most recent call last):\n  {text}\nValueError: {text}",
    }
    told = {"cluster": text, "scheduler": "local", "command": f"jobkit submit {text}", "cwd": text}
    resumed = {"total_steps": steps, "versions": {"python": "3.11.7", "torch": text, "device": text}}
    slow = {"rank": 1, "host": text, "seconds": 0.5, "median": 0.1, "factor": 5.0}
    events = [
        (0, "submitting", {**told, "code": "0123456789ab", "code_changes": [f"~ {text}.py"]}),
        (5, "started", {"attempt": 1, "job_id": "7", "host": text}),
        (6, "placed", {"attempt": 1, "nodes": [text, "b"], "wanted": 2}),
        (20, "resumed", {"attempt": 1, "step": 0, "joined": BEGAN + 15, "checkpoint": None, **resumed}),
        (60, "checkpoint", {"attempt": 1, "step": 40, "seconds": 1.5, "stall": 0.2}),
        (70, "straggler", {"attempt": 1, **slow}),
        (82, "interrupted", {"attempt": 1, "cause": "killed", "reached": 60, "failure": failure, **_seen(80, 81)}),
        (83, "excluded", {"node": text}),
        (83, "restarted", {"attempt": 1}),
        (84, "started", {"attempt": 2, "job_id": "7", "host": text}),
        (90, "resumed", {"attempt": 2, "step": 40, "joined": BEGAN + 88, "checkpoint": "step_00000040", **resumed}),
        (120, "checkpoint", {"attempt": 2, "step": 70, "seconds": 1.0}),
    ]
    ends = {
        "failed": {"cause": "crashed", "error": f"ValueError: {text}", "failure": failure, "reached": 77},
        "finished": {"step": steps, "result": {text: 0.5, "words": text}},
    }
    if state in ends:
        events.append((150, state, {"attempt": 2, **ends[state]}))
    lines = [encode({"time": BEGAN + seconds, "event": name, **fields}) for seconds, name, fields in events]
    run.journal.path.write_bytes(b"".join(lines))
    for number in (1, 2):
        run.logs(number).mkdir(parents=True)
        run.rank_log(number, 0, "err").write_text(f"\x1b[31m{text}\x1b[0m\n")
    metrics = MetricLog(run.tensorboard, 0, lambda latest: None)
    for step in range(steps):
        metrics.scalars(step, {"train/loss": lr * 10.0 ** (-step / 20), f"{text}/score": step % 7, "perf/x": 1.0})
    metrics.scalars(steps, {"train/loss": float("nan")})
    metrics.image(steps, text, torch.rand(3, 8, 8))
    metrics.close()
    run.write_status()
    return run


def _seen(last: float, noticed: float) -> dict[str, float]:
    return {"last_seen": BEGAN + last, "noticed": BEGAN + noticed}


def hostile(mark: str) -> str:
    """Texts that would run a script of their own, or break what is around them, where one is not escaped."""
    run = f"document.documentElement.dataset.broken={json.dumps(mark)}"
    return (
        f'</script></style><script>{run}</script><img src=x onerror=\'{run}\'>" onload="{run}" {{{{7*7}}}} <!-- &amp;'
    )
