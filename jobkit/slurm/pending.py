"""Why a job waits in the queue: Slurm's words (`man squeue`, JOB REASON CODES) in plain words.

run/view.py calls it. Why Slurm stops a job is `stop_cause` in jobs.py.
"""

from __future__ import annotations

REASONS = {
    "Priority": "jobs of higher priority are before it",
    "Resources": "the nodes that it needs are in use",
    "DependencyNeverSatisfied": "a job that it waits for ended otherwise than was asked for: it will never start",
    "Dependency": "the jobs that it waits for have not ended",
    "BeginTime": "it may start later only, as `begin` says, or about two minutes after a requeue",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved, as for maintenance before its time is over",
    "PartitionConfig": "the partition does not take it: more nodes than it has or allows, or none that it may use",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows, or for fewer",
    "PartitionTimeLimit": "its time limit is longer than the partition allows: set a shorter resources.time",
    "BadConstraints": "no node is as it asks for: see `constraint` and the like in the cluster's entry",
    "PartitionDown": "its partition is down: it waits until that is up again",
    "PartitionInactive": "its partition is inactive: it waits until that is up again",
    "MaxMemPerLimit": "it asks for more memory than a limit of Slurm allows: set a smaller `mem` or `mem_per_cpu`",
    "AccountNotAllowed": "the partition does not take jobs of this account",
    "Cleaning": "it was requeued, and its last start is still being cleaned up",
    "JobArrayTaskLimit": "as many runs of its sweep as may run at once (--max-running) are running",
    "launch failed requeued held": "it could not be started, and Slurm holds it",
    "None": "Slurm has not looked at it yet",
    "QOSMax": "the limit of its QOS: it waits for own jobs, or those of the account, to end",
    "QOSGrp": "the limit that all jobs of its QOS share has been reached",
    "QOS": "a limit of its QOS (`sacctmgr show qos` lists them)",
    "AssocMax": "the limit of your account: it waits for own jobs to end",
    "AssocGrp": "the limit that all users of the account share has been reached",
    "Assoc": "a limit of your account (`sacctmgr show assoc user=$USER` lists them)",
    "Nodes required for job are DOWN": "nodes that it needs are down, drained, or kept for jobs of higher priority",
}
"""The beginning of Slurm's word -> its meaning: there are 60 limits of accounts and QOS."""


def explain_reason(reason: str) -> str:
    """Return Slurm's reason in plain words, with its own word; additions of Slurm, as names of nodes, stay."""
    word = reason.partition(",")[0].strip().removeprefix("(").removesuffix(")")
    if word.startswith(("QOS", "Assoc")) and "PerJob" in word:
        whose = "its QOS" if word.startswith("QOS") else "your account"
        return f"it asks for more than {whose} allows one job, and will not start so (Slurm: {reason})"
    words = next((text for beginning, text in REASONS.items() if word.replace("_", " ").startswith(beginning)), "")
    return f"{words} (Slurm: {reason})" if words else f"{reason} (Slurm's word; `man squeue` explains it)"
