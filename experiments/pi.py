"""Estimate pi by random points: a program of its own that any launcher could start, and that saves when it is told to.

Each rank draws points, counts those in the circle, and keeps its count in a file. SIGTERM means: save, and exit with
75, so that jobkit starts the program again where it stopped. Rank 0 adds up the files of all ranks at the end.

    python -m jobkit.submit experiments/pi.yaml --local
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

stop_asked = False


def ask_to_stop(number: int, frame: object) -> None:
    global stop_asked
    stop_asked = True


def save(file: Path, state: dict[str, int]) -> None:
    """Replace the file: a reader, or a crash, sees the old state or the new one."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(state))
    temporary.replace(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the counts")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of 20,000 points a rank")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, ask_to_stop)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"rank_{rank}.json"
    state = json.loads(file.read_text()) if file.exists() else {"rounds": 0, "inside": 0}
    while state["rounds"] < options.rounds:
        draw = random.Random(rank * 1_000_003 + state["rounds"])  # a function of the position: exact after any stop
        state["inside"] += sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(20_000))
        state["rounds"] += 1
        save(file, state)
        if rank == 0 and state["rounds"] % 500 == 0:
            print(f"round {state['rounds']}/{options.rounds}", flush=True)
        if stop_asked and state["rounds"] < options.rounds:
            return 75
    files = [options.out / f"rank_{other}.json" for other in range(world_size)]
    while rank == 0 and any(not f.exists() or json.loads(f.read_text())["rounds"] < options.rounds for f in files):
        if stop_asked:
            return 75
        time.sleep(0.1)
    if rank == 0:
        inside = sum(json.loads(f.read_text())["inside"] for f in files)
        print(f"pi is about {4 * inside / (20_000 * options.rounds * world_size):.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
