"""jobkit doctor: would a run work here, and how fast is the network?"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobkit import slurm
from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED
from jobkit.run.experiment import LoadedConfig, load
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.run.usage import show_examples
from jobkit.run.yamlfile import dump
from jobkit.submission import checks
from jobkit.submission.checks import OK, PROBLEM, WARNING, Check
from jobkit.submission.plan import make_plan
from jobkit.submission.probe import TASK, run_probe

SEEN_LATE_SECONDS = 5.0
"""From a file's replacement to the other node's seeing it: what is shorter nobody who waits for a run notices."""

SLOW_NAME_SECONDS = 1.0
"""For the name of an address: with more of them the ranks of many nodes come late to their rendezvous."""

COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in clusters.slurm.partition=low")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="this machine (default where there is no sbatch)")
    place.add_argument("--cluster", metavar="NAME", help="slurm, or a name in your own config file")
    parser.add_argument("--nodes", type=int, metavar="N", help="of the probe (default: 2 on a cluster, 1 here)")
    parser.add_argument("--tasks-per-node", type=int, metavar="N", help="default: 1 on a cluster, 2 here")
    parser.add_argument("--gpus-per-task", type=int, default=0, metavar="N", help="default: 0, the CPU")
    parser.add_argument("--no-probe", action="store_true", help="checks only: start nothing")
    parser.add_argument("--json", action="store_true", help="for programs: {ok, checks, probe}")
    add_runs_dir(parser)
    show_examples(
        parser,
        "--cluster h100 --nodes 2  check a cluster of your config file, and two nodes' network",
        "--local --no-probe  check this machine; start nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the checks and what the probe found; exit code 1 where something is a problem."""
    runs = runs_dir(arguments)
    console = Console(stderr=arguments.json, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="jobkit-doctor-") as folder:
        cluster = "local" if arguments.local else arguments.cluster or ("slurm" if slurm.available() else "local")
        loaded = _experiment(arguments, cluster, Path(folder))
        with loaded.places.locating_errors():
            plan = make_plan(runs / "doctor", loaded.config, cluster)
        resources = plan.config.resources
        found = [*checks.check_machine(resources.devices_per_rank), checks.check_runs_dir(runs)]
        if plan.scheduler == "slurm":
            found += checks.check_slurm(plan.parameters.get("partition"), resources.nodes)
        for check in found:
            _say(console, check)
        probe: dict[str, Any] | None = None
        if not arguments.no_probe and all(check.state != PROBLEM for check in found):
            measured, status = run_probe(loaded, plan, Path(folder), lambda line: console.print(line, markup=False))
            probe = status.result if status.state == State.FINISHED else None
            told = [verdict(measured, status, resources.nodes)]
            told += [disk_verdict(probe["disk"]), *names_verdict(probe["names"])] if probe is not None else []
            for check in told:
                _say(console, check)
            found += told
    ok = all(check.state != PROBLEM for check in found)
    if arguments.json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in found], "probe": probe}, indent=1))
    elif probe is not None:
        for table in tables(probe):
            console.print(table)
    return EXIT_FINISHED if ok else EXIT_FAILED


def _experiment(arguments: argparse.Namespace, cluster: str, folder: Path) -> LoadedConfig:
    """The probe as an experiment: with the user's own clusters, and overrides like any other."""
    here = cluster == "local"
    resources = {
        "nodes": arguments.nodes or (1 if here else 2),
        "tasks_per_node": arguments.tasks_per_node or (2 if here else 1),
        "gpus_per_task": arguments.gpus_per_task,
        "time": "0:10:00",
    }
    file = folder / "doctor.yaml"
    file.write_text(
        dump({"name": "doctor", "task": TASK, "resources": resources, "retry": {"crash": 1}}), encoding="utf-8"
    )
    return load(file, arguments.overrides)


def _say(console: Console, check: Check) -> None:
    console.print(f"[{COLOURS[check.state]}]{check.state:8}[/]", end="")
    console.print(check.found + (f": {check.advice}" if check.advice else ""), markup=False)


# What it found


def verdict(run: RunDir, status: Status, nodes: int) -> Check:
    """The probe in a line; a slow node is a warning that names it."""
    probe = status.result
    if status.state != State.FINISHED:
        logs = f"python -m jobkit logs {run.name} --runs-dir {run.path.parent}"
        return Check("network", PROBLEM, f"the probe is {status.state}: {status.error or 'its log says more'}", logs)
    small, large = probe["world"][0], probe["world"][-1]
    found = (
        f"all-reduce of {probe['ranks']} ranks on {nodes} node(s) ({probe['backend']}, {probe['device']}): "
        f"{_seconds(small['seconds'])} for {_size(small['bytes'])}, {_rate(large['bus'])} for {_size(large['bytes'])}"
    )
    if not probe["slow"]:
        return Check("network", OK, found)
    names = ", ".join(probe["slow"])
    return Check("network", WARNING, f"{found}; slow: {names}", f"repeat it, and exclude {names} if it stays so")


def names_verdict(names: dict[str, Any]) -> list[Check]:
    """A warning where the name service keeps ranks waiting; nothing where it does not."""
    if names["seconds"] <= SLOW_NAME_SECONDS:
        return []
    found = f"the name service takes {names['seconds']:.1f} s for {names['address']}, the address of a node"
    advice = (
        "torch asks for that of each rank, one after the other, before they train: cache names on the nodes "
        "(nscd, sssd, systemd-resolved), or write them into /etc/hosts in the form in which it asks: "
        f"`::ffff:{names['address']} NAME`"
    )
    return [Check("names", WARNING, found, advice)]


def disk_verdict(disk: dict[str, Any]) -> Check:
    """What two nodes found of the run directory's disk."""
    name, (first, second) = "shared disk", disk["between"]
    same = first.partition("#")[0] == second.partition("#")[0]
    where = (
        f"two processes of {first.partition('#')[0]} (other nodes were not tried)" if same else f"{first} and {second}"
    )
    elsewhere = "set --runs-dir or JOBKIT_RUNS to another file system"
    if disk["problems"]:
        said = "; ".join(f"{what}: {problem}" for what, problem in disk["problems"].items())
        return Check(name, PROBLEM, f"between {where}: {said}", elsewhere)
    seen = f"a replaced file is seen after {disk['seen_after']:.2g} s"
    if disk["lost_lines"]:
        lost = f"{disk['lost_lines']} lines were lost that both appended at once"
        advice = f"events of a run could be lost that two nodes write in the same instant; {elsewhere}"
        return Check(name, WARNING, f"between {where}: locks work, {seen}, but {lost}", advice)
    if disk["seen_after"] > SEEN_LATE_SECONDS:
        advice = "commands see late how a run stands; mount with lookupcache=positive, or a lower actimeo"
        return Check(name, WARNING, f"between {where}: locks and appends work, but {seen}", advice)
    return Check(name, OK, f"between {where}: locks work, {seen}, appends lose no line")


def tables(probe: dict[str, Any]) -> list[Table]:
    """What the probe measured: over all ranks by size, then node by node."""
    world = Table("all ranks", "time", "bus bandwidth")
    for row in probe["world"]:
        world.add_row(_size(row["bytes"]), _seconds(row["seconds"]), _rate(row["bus"]))
    nodes = Table("node", "inside", "with its neighbours", "")
    for row in probe["nodes"]:
        slow = "slow" if row["node"] in probe["slow"] else ""
        if row["inside"] or row["between"]:
            nodes.add_row(row["node"], _rate(row["inside"]), _rate(row["between"]), slow)
    return [world, nodes] if nodes.rows else [world]


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
