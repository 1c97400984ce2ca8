"""jobkit.init: the context in a script of the user's own, under any launcher, or in the `command:` of a YAML.

    python train.py | torchrun train.py | srun python train.py --> jobkit.init() --> Context ... ctx.finish(result)
    the interpreter's end --> RankReport, as for a task (ending.py)

Nothing of the script's is patched: an exception hook and an exit function note how the script ended, in the rank's own
process alone: a process that the script forks inherits both. Neither of them sees the code of a sys.exit, so that a
script has finished where ctx.finish has returned, and nowhere else.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobkit.config.identity import run_name
from jobkit.config.interpolation import NoValue, resolve
from jobkit.config.load import Loaded, load
from jobkit.config.schema import AUTO, Config
from jobkit.config.strict import build
from jobkit.config.yamlfile import COMMAND_LINE, KeyLocations
from jobkit.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_RESUMABLE,
    InputError,
    JobkitError,
    LostLease,
    Stopped,
)
from jobkit.log import configure, log
from jobkit.loop.calls import fitting
from jobkit.loop.context import Context
from jobkit.loop.join import join, leave
from jobkit.loop.rank import Rank
from jobkit.run.rundir import RunDir
from jobkit.run.runs import runs_dir_of
from jobkit.wire.signals import STOP_SIGNALS, take_stop_signals
from jobkit.worker import foreign_attempt
from jobkit.worker.ending import end_of, explained, record
from jobkit.worker.foreign_attempt import ForeignAttempt
from jobkit.worker.launchers import Topology, find_launch

OF_LAUNCHER = frozenset({"local_rank", "distributed", "dist_backend", "dist_url"})
"""Arguments that torch.distributed.launch gives a script, or that the references' `init_distributed_mode(args)` sets:
they say nothing of what is computed."""

PLACES = {"rank": "rank", "gpu": "local_rank", "world_size": "world_size"}
"""Its arguments that mean the place of a rank, and the field of Topology; with another value they mean something
else."""


RESOLVED = "params=OmegaConf.to_container(cfg, resolve=True) gives it its value; a text with ${ in it is written \\${"
"""What to type for an expression that stands in the params of a script."""


def _exit_with(words: str) -> SystemExit:
    print(f"error: {words}", file=sys.stderr)
    return SystemExit(EXIT_BAD_INPUT)


@fitting("jobkit.init", _exit_with)
def init(
    config: Path | str | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int | str | None = AUTO,
    runs_dir: Path | str | None = None,
) -> Context:
    """Return the context of this rank, in a script under python, torchrun, mpirun or srun. All ranks call it.

    ctx = jobkit.init(params={"lr": 1e-3})
    for epoch in ctx.epochs(10, model=model, optimizer=optimizer):
        for x, y in ctx.batches(loader): ...
    ctx.finish({"loss": loss.item()})

    `config` is a YAML as the submission takes it, and needs no `task:`. `params`, as vars(args), `name` and `seed` win
    over it; without a YAML `name` (the script's by default) and `params` name the run. The same call continues the same
    run. Without `seed` it is `params["seed"]`, where that is a whole number, else 0. A script that then seeds itself,
    as by torch.manual_seed, has other random numbers for each seed; `seed=None` leaves them to it alone. In the
    `command:` of a YAML it is that run, and the other arguments do not count. Where the run has finished already, the
    script ends with 0; for wrong input, and where the ranks do not form one world, with 2 or 1, and a line.
    """
    configure("stdout")
    if os.environ.get("JOBKIT_RUN") and os.environ.get("JOBKIT_ATTEMPT"):
        rank = Rank.of_environment(RunDir(os.environ["JOBKIT_RUN"]))
        if seed is None and rank.run.drill() is None:  # a verification seeds
            rank.config = dataclasses.replace(rank.config, seed=None)
        take_stop_signals()
        return _opened(rank, join(rank), None)
    import torch.distributed as dist

    stands = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    try:
        launch = find_launch(os.environ, stands)
        if not isinstance(config, (str, PurePath, type(None))):
            hint = "the values of a parser: jobkit.init(params=vars(args))"
            raise InputError(key="jobkit.init", found=type(config).__name__, allowed="the path of a YAML", hint=hint)
        values = _values(params, launch.topology)
        loaded = load(Path(config), _words(name, values, seed), _program()) if config else _loaded(name, values, seed)
        folder = runs_dir_of(Path(runs_dir) if runs_dir is not None else None)
        begun = foreign_attempt.begin(loaded, RunDir(folder / run_name(loaded.config)), launch)
    except JobkitError as error:
        print(f"error: {_of_init(error) if isinstance(error, InputError) else error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if begun is None:
        raise SystemExit(EXIT_FINISHED)
    return _opened(begun.rank, begun.joined, begun)


def _of_init(error: InputError) -> InputError:
    """Return an error with the place of its value in the script: no file and no command line has the arguments."""
    argument, _, key = error.key.partition(".")
    if error.file not in (None, COMMAND_LINE) or argument not in ("name", "params", "seed"):
        return error
    place = f"jobkit.init({argument}=...)" + (f": {key}" if key else "")
    hint = RESOLVED if isinstance(error, NoValue) else error.hint
    return InputError(error.problem, key=place, found=error.found, allowed=error.allowed, hint=hint)


def _program() -> list[str]:
    """The script as the program of its run: others cannot import it, and machines have it in other folders."""
    return ["python", Path(sys.argv[0]).name]


def _values(params: Mapping[str, Any] | None, topology: Topology) -> dict[str, Any]:
    """Return the params without those that only say where a rank is. Raises InputError."""
    if not isinstance(params, (Mapping, type(None))):
        raise InputError(key="jobkit.init(params=...)", found=params, allowed="a mapping of names to plain values")
    places = dataclasses.asdict(topology)
    return {
        str(key): _plain(str(key), value)
        for key, value in (_contained("", params) or {}).items()
        if key not in OF_LAUNCHER and not (key in PLACES and value == places[PLACES[key]])
    }


def _words(name: str | None, values: Mapping[str, Any], seed: int | str | None) -> list[str]:
    """Return the arguments of `init` as words of a command line, which win over the YAML."""
    words = [f"+params.{key}={json.dumps(value)}" for key, value in values.items()]
    words += [] if name is None else [f"name={name}"]
    return words if seed == AUTO else [*words, f"seed={json.dumps(seed)}"]


def _loaded(name: str | None, values: dict[str, Any], seed: int | str | None) -> Loaded:
    script = re.sub(r"[^\w.-]+", "-", Path(sys.argv[0]).stem, flags=re.ASCII).strip("-._")
    is_file = Path(sys.argv[0]).is_file()  # else it is `-c`, `-` or nothing
    values = {
        "name": name or (script if is_file else "") or "interactive",
        "command": _program(),
        "params": values,
        "seed": seed,
        "resources": {"gpus_per_task": AUTO},
    }
    config = build(Config, values)
    loaded = Loaded(config=config, places=KeyLocations(Path(sys.argv[0])), notes=[], expressions={})
    # As ranks and commands read it: else they would refuse a config.yaml that nobody wrote.
    resolve(loaded.written)
    return loaded


def _contained(key: str, value: Any) -> Any:
    """Return the values of a config of OmegaConf's. Raises InputError for one without a value."""
    if not OmegaConf.is_config(value):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        inner = f"{key}.{error.full_key or ''}".strip(".")
        raise InputError(str(error).splitlines()[0], key=f"params.{inner}", hint="give it a value before") from None


def _plain(key: str, value: Any) -> Any:
    """A param as a YAML can hold it. Raises InputError for an object that no text names."""
    value = _contained(key, value)
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{key}.{number}", item) for number, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath) or type(value).__module__ == "torch":  # a device, a dtype
        return str(value)
    allowed = "numbers, texts, paths, None, and lists and mappings of them: leave it out"
    raise InputError(key=f"params.{key}", found=value, allowed=allowed)


def _opened(rank: Rank, joined: Any, begun: ForeignAttempt | None) -> Context:
    end = _ScriptEnd(rank, begun)
    end.register()  # first: a checkpoint that cannot be read is an end as well
    if rank.rank == 0:
        _name_seeds_before(rank.config.random_seed)
    context = end.context = Context(rank, joined, os.environ)
    if context.is_done:
        context.finish_again()
        raise SystemExit(EXIT_FINISHED)
    if rank.rank == 0 and begun is not None:
        where = f"goes on from step {context.step}" if context.step else "begins"
        log.info("%s %s; run directory: %s", rank.run.name, where, rank.run.path)
    return context


def _name_seeds_before(seed: int | None) -> None:
    """Warn of a seed that the script has set, and that jobkit's own replaces."""
    import torch

    before = torch.initial_seed()  # a random number of 64 bits where nobody has seeded
    if seed not in (None, before) and before < 1 << 32:
        words = "torch.manual_seed(%d) came before jobkit.init, which seeds again, with %d: put it after jobkit.init"
        log.warning(words, before, seed)


class _ScriptEnd:
    """Notes how the script ended, once."""

    context: Context | None = None

    def __init__(self, rank: Rank, begun: ForeignAttempt | None) -> None:
        self._rank, self._begun = rank, begun
        self._is_noted = False

    def register(self) -> None:
        shown = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not self._rank.is_here:
                shown(kind, error, trace)
                return
            error = explained(self._rank, error)
            if isinstance(error, LostLease):
                log.warning("%s", error)
                os._exit(EXIT_RESUMABLE)
            if isinstance(error, JobkitError):
                print(f"error: {error}", file=sys.stderr)
            else:
                shown(kind, error, trace)
            self._note(error)

        sys.excepthook = hook
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self.context is not None and self._rank.is_here:
            self._note(self.context.stopped or self._unfinished(self.context))

    def _unfinished(self, context: Context) -> JobkitError | None:
        """Return the error of a script that ended by itself before ctx.finish."""
        if self._is_noted or context.is_finished:
            return None
        error = JobkitError(
            f"the script ended at step {context.step} without ctx.finish(result), which has to be its last line; "
            "the same command continues it"
        )
        print(f"error: {error}", file=sys.stderr)
        return error

    def _note(self, error: BaseException | None) -> None:
        if self._is_noted:
            return
        self._is_noted = True
        if isinstance(error, Stopped):  # the interpreter's end takes its handlers away: a signal would change the code
            for number in (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        if self.context is not None and (error is None or isinstance(error, Stopped)):
            self.context.close()
            leave()  # threads of a process group that stands would abort the interpreter's end, now and then
        end = end_of(self._rank, error, self.context.result if self.context is not None else None)
        record(self._rank, end)
        codes = {"finished": EXIT_FINISHED, "stopped": EXIT_RESUMABLE, "failed": EXIT_FAILED}
        if self._begun is not None:
            self._begun.close(end, codes[end.kind])
            if end.kind == "finished" and self._rank.rank == 0:
                log.info("%s finished; run directory: %s", self._rank.run.name, self._rank.run.path)
