"""Which interruptions chaos.py draws from, how common each is, and a plan of them that follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

EVERY = 10
"""Steps between two checkpoints."""
RANKS = 4

STEPS, SAVING, TOGETHER, RECOVERY = "steps", "saving", "two_at_once", "during_recovery"
MOMENTS = {
    STEPS: "after some steps of the attempt",
    SAVING: "while a checkpoint is being written",
    TOGETHER: "within a second after the one before",
    RECOVERY: "while the attempt starts",
}


@dataclass(frozen=True)
class Event:
    """One planned interruption."""

    number: int
    kind: str
    moment: str
    steps: int
    """With `steps` and `saving`: how many the attempt has done."""
    delay: float
    """With `two_at_once` and `during_recovery`: how many seconds to wait."""
    rank: int
    """Whom it strikes, where it strikes one."""
    place: float
    """Which byte of a file, from 0 to 1."""

    def __str__(self) -> str:
        when = {
            STEPS: f"after {self.steps} steps",
            SAVING: f"saving, after {self.steps} steps",
            TOGETHER: f"+{self.delay:.1f} s with the last",
        }
        return when.get(self.moment, f"+{self.delay:.1f} s in start-up")


@dataclass(frozen=True)
class Kind:
    """One way to interrupt a run; chaos_actions.py has the function of the same name."""

    weight: int
    """How common it is; 0: only where it is asked for."""
    text: str
    """What happens."""
    place: str = ""
    """`slurm` or `local`; both where empty."""
    graceful: bool = False
    """The run gets the time for a checkpoint: no step may be repeated."""
    anytime: bool = True
    """Makes sense while the ranks start, and together with another."""
    by_hand: bool = False
    """The run has ended for its user: typing the same command again is what continues it."""
    own_cluster: bool = False
    """Disturbs all jobs of a cluster."""
    damages: bool = False
    """The newest checkpoint is no good afterwards."""
    in_place: bool = False
    """The ranks start again on the nodes that the job has."""


KINDS = {
    "preempt": Kind(
        8, "a job of a higher partition takes its nodes, with SIGTERM and grace", place="slurm", graceful=True
    ),
    "preempt_no_grace": Kind(3, "scontrol requeue from outside: what preemption without grace does", place="slurm"),
    "rehearsed": Kind(4, "jobkit preempt RUN", graceful=True),
    "time_limit": Kind(
        0,
        "nothing: the limit of a minute ends the attempt (the whole run has it)",
        place="slurm",
        graceful=True,
        anytime=False,
    ),
    "node_lost": Kind(
        2,
        "a node without the batch script dies, and is back 5 s after the product has reacted",
        place="slurm",
        anytime=False,
        own_cluster=True,
    ),
    "batch_node_lost": Kind(
        2,
        "the node with the batch script dies, and is back 5 s after the product has reacted",
        place="slurm",
        anytime=False,
        own_cluster=True,
    ),
    "controller_away": Kind(
        2, "a rank is killed while slurmctld is away for 20 s", place="slurm", anytime=False, own_cluster=True
    ),
    "kill_rank": Kind(6, "SIGKILL to one rank", in_place=True),
    "kill_all_ranks": Kind(3, "SIGKILL to all ranks", in_place=True),
    "kill_batch": Kind(2, "SIGKILL to the batch script", place="slurm"),
    "kill_srun": Kind(2, "SIGKILL to srun", place="slurm", in_place=True),
    "stop_rank": Kind(3, "SIGSTOP to one rank: it hangs and does not say so", in_place=True),
    "kill_worker": Kind(2, "SIGKILL to a data loader's worker (in a run that has them)", anytime=False, in_place=True),
    "exception": Kind(4, "one rank raises", in_place=True),
    "hang": Kind(3, "one rank loops for ever", in_place=True),
    "collective_hang": Kind(3, "one rank sleeps for ever, the others wait for it in a collective", in_place=True),
    "oom": Kind(3, "one rank asks for more memory than there is", in_place=True),
    "corrupt_newest": Kind(
        2, "a byte of the newest checkpoint flips, then a rank is killed", anytime=False, damages=True, in_place=True
    ),
    "truncate_newest": Kind(
        2,
        "the newest checkpoint loses the end of a file, then a rank is killed",
        anytime=False,
        damages=True,
        in_place=True,
    ),
    "delete_latest": Kind(1, "the link checkpoints/latest goes, then a rank is killed", anytime=False, in_place=True),
    "ctrl_c": Kind(4, "Ctrl-C, and the same command again", place="local", graceful=True, by_hand=True),
    "terminate": Kind(
        2, "SIGTERM to the command, and the same command again", place="local", graceful=True, by_hand=True
    ),
    "kill_command": Kind(
        3,
        "SIGKILL to the command in the foreground, and the same command again",
        place="local",
        graceful=True,
        by_hand=True,
    ),
    "kill_supervisor": Kind(3, "SIGKILL to the supervisor, and the same command again", place="local", by_hand=True),
}


def choose(only: str, place: str, own_cluster: bool = True) -> tuple[list[str], list[str]]:
    """The kinds and the moments that --only leaves, of those that there are in a place; ValueError for another name."""
    names = [name for name in only.split(",") if name]
    if unknown := [name for name in names if name not in KINDS and name not in MOMENTS]:
        raise ValueError(f"--only {unknown[0]}: known are {', '.join([*KINDS, *MOMENTS])}")
    there = [
        name for name, kind in KINDS.items() if kind.place in ("", place) and (own_cluster or not kind.own_cluster)
    ]
    kinds = [name for name in there if name in names] or [name for name in there if KINDS[name].weight]
    return kinds, [moment for moment in MOMENTS if moment in names] or list(MOMENTS)


def draw(seed: int, count: int, kinds: list[str], moments: list[str]) -> list[Event]:
    """A plan: the same for the same arguments.

    Crashes that leave the run where it was are limited by its budget: after two of them it gets time for a checkpoint.
    """
    dice = random.Random(seed)
    plan: list[Event] = []
    fruitless = 0
    often = {STEPS: 14, SAVING: 2, TOGETHER: 1, RECOVERY: 2}
    while len(plan) < count:
        name = dice.choices(kinds, [max(KINDS[name].weight, len(kinds) == 1) for name in kinds])[0]
        moment = dice.choices(moments, [often[moment] for moment in moments])[0]
        steps, delay = dice.randint(5, 25), dice.choice([0.0, dice.uniform(0, 5)])
        rank, place = dice.randrange(RANKS), dice.random()
        kind, before = KINDS[name], KINDS[plan[-1].kind] if plan else None
        if moment in (TOGETHER, RECOVERY) and not (before and before.anytime and kind.anytime):
            continue
        if moment == TOGETHER:
            delay = min(delay, 0.9)
        elif not kind.graceful:
            # What a damaged checkpoint held has to be trained, and saved, once more.
            enough = EVERY + 2 + (EVERY if kind.damages or (before and before.damages) else 0)
            fruitless = 0 if moment != RECOVERY and steps > enough else fruitless + 1
            if fruitless > 2 or (kind.damages and fruitless):
                moment = STEPS if moment == RECOVERY else moment
                steps, fruitless = dice.randint(enough + 1, 25), 0
        plan.append(Event(len(plan) + 1, name, moment, steps, round(delay, 2), rank, place))
    return plan
