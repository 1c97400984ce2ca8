#!/usr/bin/env python3
"""Print docs/config.md, the reference of the YAML, from the field docstrings of jobkit/run/config.py.

    .venv/bin/python tools/config_reference.py >docs/config.md

A test holds the file equal to what this prints.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import typing
from typing import Any

from jobkit.run import config, strict
from jobkit.run.notify import Notify
from jobkit.submission import options

HEAD = """\
# The YAML, key by key

Written by `.venv/bin/python tools/config_reference.py >docs/config.md` from the docstrings in `jobkit/run/config.py`.
Change them there; `tests/unit/test_docs.py` holds this file equal to what the command prints.

A mistake in the YAML is refused before anything is queued, with exit code 2, in a line that names the file, the key,
what was found, what is allowed and the nearest valid name. The keys of `params` and the names of `clusters` are yours;
all others are checked.

Times are `30s`, `10min`, `2h`, `3d`, or what `sbatch --time` takes: `1:30:00`, `1-12:00:00`; a bare number is minutes.

## Top level
"""

CLUSTERS = """
A cluster entry is chosen by `--cluster NAME`. It holds

- `scheduler`: `slurm` (default) or `local`;
- any option of `man sbatch`, spelled with `-` or `_`: `partition`, `account`, `qos`, `constraint`, `mem` ...;
- any key of `resources`, which then replaces the YAML's for this cluster, unless the command line gives that key;
- Submitit's `setup` and `teardown` (shell lines before and after the ranks; a line of `setup` that fails ends the
  attempt before it trains) and `srun_args`. Where the job goes into the queue again, `teardown` is cut off when its
  time is over. A `trap ... EXIT` of `setup` is run at the end; a line that fails after it is not tried on another node.

`--cluster slurm` and `--cluster local` need no entry. Entries for every project go into `~/.config/jobkit/config.yaml`
(or `$JOBKIT_CONFIG`), under the same key `clusters:`; the YAML's own entry of a name wins.

jobkit sets these options of sbatch itself, and refuses them in an entry:

| option | instead |
|---|---|
"""

NOTIFY = """
## `notify`

In your own file alone (`~/.config/jobkit/config.yaml`, or `$JOBKIT_CONFIG`): a command, or a mapping with these keys.
[Waiting and notifications](many-runs.md#waiting-and-notifications) has an example.

"""

TAIL = """
## `demo`

```yaml
params: {data: "${oc.env:IMAGENET_DIR}", steps: 100000}
demo:
  unless_env: IMAGENET_DIR
  params: {data: data/digits, steps: 400}
```

A section that is merged over the rest when the environment variable that `unless_env` names is unset or empty; a line
on the terminal says so. `--demo` and `--no-demo` decide it by hand. Any key may stand in it.

## `sweep`

```yaml
sweep: {params.lr: [.003, .01], seed: range(3)}
```

A run for each combination of values; [many-runs.md](many-runs.md#sweeps) says more.

## Interpolation and overrides

Values may refer to others and to the environment, as [OmegaConf](https://omegaconf.readthedocs.io) does:
`${params.data}`, `${oc.env:IMAGENET_DIR}`, `${oc.env:HOME,/tmp}` with a default. `???` is a value that the command line
must give. Where such a variable is another one, or unset, the same command means another run. So what is
printed to continue a run that has them is `jobkit resume RUN`, which takes their values from the run.

`key=value` on the command line sets a value after `demo` and before interpolation: `params.lr=3e-4`,
`resources.nodes=8`, `parallel=zero3`, `params.sizes=[1,2,3]`. One of `params` that is not in the file is refused, with
the nearest name; `+params.width=64` adds it (or sets it, where it is there). So is a text, or `yes`, where the file has
a number, and the like: `params.lr=1e-3x`; `+params.lr=auto` takes any value. For nothing: `params.clip=null`.

## What makes another run

The run directory is `<name>-<hash>`. The hash is of `task` or `command`, `params`, `seed` and `precision`, and of
`parallel`, `comm` and `start_from` where they differ from their defaults. Everything else says where and how safely a
run is executed, and may change between two submissions of the same run. `1` and `1.0` are the same value to it.
A submission of another run says so where the last one of that name was interrupted or has failed with a checkpoint:
what differs, how to continue that one, and how to go on from its checkpoint. A finished run whose `inputs` were written
since is not run again by itself, and that is said, too: `--fresh` runs it anew.
"""


def field_docstrings(cls: type[Any]) -> dict[str, str]:
    """The text under each field of a dataclass, on one line."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(node.target, ast.Name) and isinstance(following.value, ast.Constant)
            found[node.target.id] = " ".join(str(following.value.value).split())
    return found


def default(field: dataclasses.Field[Any]) -> str:
    """A field's default as YAML writes it; empty where it is required."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`" if field.default != "" else ""


def allowed(field: dataclasses.Field[Any], kind: Any) -> str:
    """What a refusal of a wrong value says is allowed."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if check := field.metadata.get("check"):
        for wrong in ("?", -1) if kind is not int else (-1,):
            try:
                check(wrong)
            except ValueError as error:
                return str(error)
    return strict.describe(kind)


def table(cls: type[Any], prefix: str = "") -> str:
    """The keys of one section."""
    texts, kinds = field_docstrings(cls), typing.get_type_hints(cls)
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            lines.append(f"| `{prefix}{field.name}` | | a mapping | See [below](#{field.name}). |")
        else:
            columns = [f"`{prefix}{field.name}`", default(field), allowed(field, kind), texts[field.name]]
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def sections() -> str:
    """Every nested section, with what its class says of it."""
    parts = []
    for field in dataclasses.fields(config.Config):
        kind = typing.get_type_hints(config.Config)[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            about = inspect.getdoc(kind) or ""
            parts += [f"## `{field.name}`", about]
            if field.name == "parallel":
                words = ", ".join(f"`{name}`" for name in config.PARALLEL_WORDS)
                parts += [f"One word ({words}), or a mapping with one or several of these keys:"]
            parts += [table(kind, f"{field.name}.")]
    return "\n\n".join(parts)


def reference() -> str:
    """The whole of docs/config.md."""
    owned = "\n".join(f"| `{name}` | {instead} |" for name, instead in options.OWNED.items())
    top = table(config.Config)
    notify = f"{NOTIFY}{table(Notify, 'notify.')}\n"
    return f"{HEAD}\n{top}\n\n{sections()}\n\n## `clusters`\n{CLUSTERS}{owned}\n{notify}{TAIL}"


if __name__ == "__main__":
    sys.stdout.write(reference())
