"""All benches of the one table, one after the other on this machine, and the table.

Each bench is a process of its own with a time limit. One that fails is said, the others go on, and the exit code is 1.
Before each it waits until the machine is idle, or says that it was not. The table is printed, and written with the
machine's description; peers that are not installed are named in it. Install the extra `bench` for them.
    python tools/bench/all.py                                  # an hour or two on an idle machine of two cores
    python tools/bench/all.py --only submit step --json FILE --markdown FILE
    python tools/bench/all.py --quick                          # whether each works: few repeats, small sizes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measured import Row, missing, parse

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

PEERS = ("torch", "submitit", "lightning", "transformers", "accelerate", "torchvision")

BUSY = 0.15
"""Of the machine's cores: with more of them at work before a bench begins, somebody else has them."""


PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Slurm's daemons are there."""


@dataclass(frozen=True)
class Bench:
    """A bench, as it is run for the table."""

    what: str
    """What it measures, where it cannot tell itself."""
    command: str
    """File and arguments."""
    quick: str
    """Further arguments, to see in seconds or few minutes whether it works."""
    minutes: float
    """After which it is ended."""
    needs: Sequence[str] = ()
    """Programs without which there is nothing to measure."""

    @property
    def file(self) -> Path:
        return FOLDER / self.command.split()[0]


SLURM = ("slurmctld", "slurmd", "sbatch", "munged")

BENCHES: Mapping[str, Bench] = {
    "submit": Bench("submission", "submit.py", "--repeats 1", 10, SLURM),
    "list": Bench("`jobkit list`", "many.py list", "--runs 100 --repeats 1", 20),
    "sweep": Bench("a sweep", "many.py sweep", "--runs 20 --bare 5", 20, SLURM),
    "start": Bench("job start to first step", "start.py", "--repeats 1", 20),
    "step": Bench("step, against by hand", "step.py", "--ranks 1 --milliseconds 2 --blocks 2", 20),
    "frameworks": Bench("step, against others", "frameworks.py", "--ranks 1 --milliseconds 2 --blocks 2", 20),
    "callbacks": Bench("step with jobkit's callback", "callbacks.py", "--milliseconds 2", 20),
    "checkpoint": Bench("checkpoint", "checkpoint.py", "--megabytes 8 --small-tensors 100 --repeats 2", 20),
    "restart": Bench("dead rank to next step", "restart.py deaths", "--repeats 1 --cred-expire 5", 30, SLURM),
    "preempted": Bench("preempted to next step", "restart.py preempted", "--repeats 1", 30, SLURM),
    "goodput": Bench("goodput", "goodput.py", "--seconds 60 --every 30", 40, SLURM),
    "simulate": Bench("simulated goodput at 1,024 GPUs", "simulate.py --table", "--quick", 20),
    "input": Bench(
        "images a second of the packed input pipeline", "input.py", "--images 512 --batches 20 --repeats 1", 20
    ),
    "evaluate": Bench("evaluation", "evaluate.py", "--ranks 2 --milliseconds 5 --batches 20 --repeats 1", 20),
    "validation": Bench("validation that draws clips", "evaluate.py --clips 16", "--clips 4 --repeats 1", 20),
    "many_ranks": Bench("64 ranks against 16", "many_ranks.py", "--many 2x2 --few 1x2 --repeats 1", 60, SLURM),
}


@dataclass
class Result:
    """What came of a bench."""

    name: str
    rows: list[Row]
    problem: str = ""
    """Why it gave no rows, or not all."""
    seconds: float = 0.0
    load: tuple[float, float] = (0.0, 0.0)
    """The machine's load before and after."""
    busy: float = 0.0
    """Of the machine's cores, what others had at work before it began."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}


# The machine


def busy_part(seconds: float = 2.0) -> float:
    """Of the machine's cores, how many are at work, while this process waits."""

    def read() -> tuple[int, int]:
        numbers = [int(number) for number in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
        return sum(numbers[:8]), numbers[3] + numbers[4]  # all, and of it idle or waiting for a disk

    all_before, idle_before = read()
    time.sleep(seconds)
    all_after, idle_after = read()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def wait_until_idle(patience: float) -> float:
    """Until others have left the cores alone, for at most so many seconds; the part that they still have."""
    until = time.monotonic() + patience
    while (busy := busy_part()) > BUSY and time.monotonic() < until:
        time.sleep(3)
    return busy


def machine() -> dict[str, str]:
    """What a reader has to know to compare: hardware, system, versions. Peers that are missing are said."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line for line in lines if line.startswith("model name")), "")
    memory = Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]
    described = {
        "CPU": f"{cpu.partition(': ')[2] or platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{int(memory) / (1 << 20):.0f} GiB",
        "system": f"{platform.freedesktop_os_release().get('PRETTY_NAME', '')}, Linux {platform.release()}",
        "Python": platform.python_version(),
    }
    for package in PEERS:
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            described[package] = "not installed"
    # Not sbatch, which does not say it without a cluster.
    described["Slurm"] = answer("slurmctld", "-V").removeprefix("slurm-wlm ") or "not installed"
    described["jobkit"] = answer("git", "-C", str(ROOT), "describe", "--always", "--dirty") or version("jobkit")
    return described


def answer(*command: str) -> str:
    """What a program prints, or nothing where there is none."""
    if (program := shutil.which(command[0], path=PATH)) is None:
        return ""
    return subprocess.run([program, *command[1:]], capture_output=True, check=False, encoding="utf-8").stdout.strip()


# The benches


def environment() -> dict[str, str]:
    """As a user has it: nothing of the developer's own configuration, and Python keeps what it has compiled."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "JOBKIT_CONFIG": str(ROOT / "build/none.yaml")}
    for name in ("JOBKIT_RUNS", "PYTHONDONTWRITEBYTECODE"):
        own.pop(name, None)
    return own


def run(name: str, bench: Bench, *, quick: bool, patience: float) -> Result:
    """Run a bench; what goes wrong is in the result."""
    if not bench.file.exists():
        return Result(name, [missing(bench.what, "", f"there is no tools/bench/{bench.file.name}")])
    if absent := [program for program in bench.needs if shutil.which(program, path=PATH) is None]:
        return Result(name, [missing(bench.what, "", f"{', '.join(absent)} not installed")])
    busy = 0.0 if quick else wait_until_idle(patience)
    _, *arguments = f"{bench.command} {bench.quick if quick else ''}".split()
    before, began = os.getloadavg()[0], time.monotonic()
    others = f", others have {busy:.0%} of the cores" if busy > BUSY else ""
    say(f"{name}: tools/bench/{bench.file.name} {' '.join(arguments)}   (load {before:.1f}{others})")
    code, printed, errors = ended([sys.executable, str(bench.file), *arguments], 60 * bench.minutes)
    rows = parse(printed)
    problem = ""
    if code is None:
        problem = f"ended after {bench.minutes:g} min"
    elif code:
        problem = f"exit code {code}: {(errors.strip() or printed.strip() or 'no output').splitlines()[-1]}"
    elif not rows:
        problem = "gave no row"
    if problem:
        say(f"{name}: FAILED, {problem}\n{errors[-3000:]}")
    for row in rows:
        say(f"    {line_of(row)}")
    return Result(name, rows, problem, round(time.monotonic() - began, 1), (before, os.getloadavg()[0]), busy)


def ended(command: Sequence[str], seconds: float) -> tuple[int | None, str, str]:
    """Exit code, output and errors of a command; the code is None where it had to be ended.

    Ctrl-C comes first: a bench then takes its private Slurm and its runs with it.
    """
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        encoding="utf-8",
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
        return process.returncode, printed, errors
    except BaseException as error:
        process.send_signal(signal.SIGINT)
        try:
            printed, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, errors = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None, printed, errors
        raise


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The table


def number(value: float, unit: str) -> str:
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if unit == "times" else f"{text} {unit}"


def measurement(row: Row) -> str:
    """The median and its spread, or why there is none."""
    if row.missing:
        return f"not measured: {row.missing}"
    text = number(row.value, row.unit)
    low, high = row.spread
    if len(row.values) > 1:
        text += f" ({number(low, 'times')} to {number(high, 'times')})"
    return text


def bound(row: Row) -> str:
    if row.bound is None:
        return ""
    words = {
        ("lower", False): "",
        ("lower", True): "below ",
        ("higher", False): "at least ",
        ("higher", True): "above ",
    }
    return words[row.better, row.below] + number(row.bound, row.unit)


def line_of(row: Row) -> str:
    against = f", against {row.against}" if row.against else ""
    asked = f"; bound {bound(row)}: {VERDICTS[row.met]}" if row.met is not None else ""
    return f"{row.row}{against}: {measurement(row)}{asked}"


VERDICTS = {True: "met", False: "**missed**", None: ""}


def markdown(results: Sequence[Result], described: Mapping[str, str]) -> str:
    """The table, with what it was measured on, and what there is to say about how."""
    lines = ["; ".join(f"{name} {value}" for name, value in described.items()) + ".", ""]
    lines += ["| what | against | measured: median (spread) | at most | | note |", "|---|---|---|---|---|---|"]
    for result in results:
        for row in result.rows:
            cells = [row.row, row.against, measurement(row), bound(row), VERDICTS[row.met], row.note]
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    remarks = [f"{result.name} failed: {result.problem}" for result in results if result.problem]
    remarks += [
        f"while {result.name} began, others had {result.busy:.0%} of the cores"
        for result in results
        if result.busy > BUSY
    ]
    if remarks:
        lines += ["", f"{'; '.join(remarks)}."]
    return "\n".join(lines) + "\n"


def summary(results: Sequence[Result]) -> str:
    rows = [row for result in results for row in result.rows]
    counts = {True: 0, False: 0}
    for row in rows:
        if row.met is not None:
            counts[row.met] += 1
    absent = sum(bool(row.missing) for row in rows)
    failed = sum(bool(result.problem) for result in results)
    return (
        f"{len(rows)} rows: {counts[True]} within their bound, {counts[False]} not, {absent} not measured; "
        f"{failed} of {len(results)} benches failed"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--without", nargs="+", choices=BENCHES, default=[], metavar="NAME", help="all others")
    parser.add_argument("--quick", action="store_true", help="few repeats and small sizes: whether they work")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds to wait for an idle machine, before each"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build/bench.json", help="default: build/bench.json")
    parser.add_argument("--markdown", type=Path, default=ROOT / "build/bench.md", help="default: build/bench.md")
    options = parser.parse_args(arguments)
    described = machine()
    say("\n".join(f"{name}: {value}" for name, value in described.items()))
    names = [name for name in options.only or BENCHES if name not in options.without]
    results: list[Result] = []
    for name in names:
        results.append(run(name, BENCHES[name], quick=options.quick, patience=options.patience))
        # After each: what an hour has measured is not lost with the next.
        told = {"machine": described, "benches": [result.as_dict() for result in results]}
        for file, text in (
            (options.json, json.dumps(told, indent=1)),
            (options.markdown, markdown(results, described)),
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    print(markdown(results, described))
    say(summary(results))
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
