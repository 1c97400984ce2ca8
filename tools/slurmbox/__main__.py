"""The command `slurmbox`: up, down and status of a cluster, and a few ways to break it.

Runs as `python -m slurmbox` with this package's parent in PYTHONPATH, and as `python path/to/slurmbox`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import sys
from pathlib import Path

if not __package__:  # run by path: the folder itself is in sys.path, and its config.py would hide others
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import slurmbox
from slurmbox import Cluster, ClusterError, MissingPackages, Process, Settings, wait_until
from slurmbox.config import user_name

VERBS = {
    "up": "start a cluster and print the line that selects it; a cluster that is up stays as it is",
    "down": "end the cluster with all its jobs and remove its directory",
    "status": "show daemons, nodes and jobs; exit code 1 if the cluster is not up",
    "preempt": "take the nodes of a running job away",
    "kill-node": "lose a node and all that runs on it",
    "restart-node": "bring a lost node back",
    "guard": "wait for a process to end, then `down`; `Cluster` starts it",
}
ARGUMENTS = {"preempt": ("job",), "kill-node": ("node",), "restart-node": ("node",), "guard": ("pid", "started")}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python tools/slurmbox", description=slurmbox.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    # Another user of a cluster that root starts cannot enter root's XDG_RUNTIME_DIR.
    base = (os.getuid() and os.environ.get("XDG_RUNTIME_DIR")) or "/tmp"
    for verb, text in VERBS.items():
        command = verbs.add_parser(
            verb, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_argument("--dir", default=f"{base}/slurmbox-{user_name()}", help="where the cluster is")
        for name in ARGUMENTS.get(verb, ()):
            command.add_argument(name)
        for setting in dataclasses.fields(Settings) if verb == "up" else ():
            flag = "--" + setting.name.replace("_", "-")
            if setting.type == "bool":
                action = argparse.BooleanOptionalAction
                command.add_argument(flag, default=setting.default, action=action, **setting.metadata)
            else:
                kind = int if setting.type == "int" else str
                command.add_argument(flag, default=setting.default, type=kind, **setting.metadata)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Run a verb; returns the exit code."""
    settings = {name: value for name, value in vars(options).items() if name in Settings.__dataclass_fields__}
    cluster = Cluster(options.dir, **settings)
    select = f"export SLURM_CONF={shlex.quote(str(cluster.conf))}"
    if options.verb == "up":
        was_up = cluster.is_up
        cluster.up()
        print(f"{cluster.dir}: {'was already' if was_up else 'is'} up", file=sys.stderr)
        print(select)
    elif options.verb == "down":
        cluster.down()
    elif options.verb == "guard":
        owner = Process(int(options.pid), 0, "", int(options.started))
        wait_until(lambda: not owner.alive, "the owner to end", float("inf"))
        cluster.down()
    elif not cluster.is_up:
        print(f"{cluster.dir}: not up", file=sys.stderr)
        return 1
    elif "node" in options and options.node not in cluster.command("sinfo", "-hNo", "%N").split():
        print(f"{options.node}: no node of this cluster", file=sys.stderr)
        return 1
    elif options.verb == "preempt":
        print(cluster.preempt(options.job))
    elif options.verb == "kill-node":
        cluster.kill_node(options.node)
    elif options.verb == "restart-node":
        if options.node in cluster.daemons():
            print(f"{options.node}: its slurmd runs", file=sys.stderr)
        else:
            cluster.restart_node(options.node)
    else:
        for name, process in cluster.daemons().items():
            print(f"{name:12} process {process.pid}")
        print("", cluster.command("sinfo", "-N", "-l"), "", cluster.command("squeue"), "", select, sep="\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 2 if packages are missing, 1 for other failures."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a killed `up` cleans up
    try:
        return run(options)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, MissingPackages) else 1


if __name__ == "__main__":
    sys.exit(main())
