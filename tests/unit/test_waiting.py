"""Slurm's words for why a job waits are explained, and stay to be looked up."""

from __future__ import annotations

import pytest

from jobkit.submission.waiting import REASONS, explained


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs of higher priority are before it (Slurm: Priority)"),
        ("QOSMaxCpuPerUserLimit", "the limit of its QOS"),
        ("QOSGrpGRES", "all jobs of its QOS share"),
        ("QOSMaxWallDurationPerJobLimit", "more than its QOS allows one job"),
        ("AssocMaxNodePerJobLimit", "more than your account allows one job"),
        ("AssocGrpCpuLimit", "all users of the account share"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "(Slurm: ReqNodeNotAvail, UnavailableNodes:node[1-2])"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "nodes that it needs are down"),
        ("SomethingNew", "SomethingNew (Slurm's word; `man squeue` explains it)"),
    ],
)
def test_a_reason_is_explained(reason: str, words: str) -> None:
    assert words in explained(reason) and reason in explained(reason)


def test_the_reasons_of_the_issue_are_known() -> None:
    known = {"PartitionConfig", "PartitionTimeLimit", "ReqNodeNotAvail", "Resources", "Priority", "Dependency"}
    assert known <= set(REASONS)
