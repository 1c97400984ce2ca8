"""A power cut at any instant of a submission or an attempt: what another file, or a job, relies on is on the disk."""

from __future__ import annotations

from pathlib import Path

from harness.disk import MOVES, SYNCS, Disk, traced
from harness.runs import Project, with_params

from jobkit.run.rundir import RunDir

VIEWS = ("progress.json", "status.json", "code")
"""Files that follow from others: a power cut may take the newest of them."""


def test_each_event_and_each_record_is_on_the_disk_before_the_next(project: Project, tmp_path: Path) -> None:
    words = project.words("submit", str(project.yaml), "--local", *with_params({"steps": 5}))
    runs = project.folder / "runs"
    calls = list(traced(words, tmp_path, runs, cwd=project.folder, env=project.environment))
    (folder,) = runs.glob("scripted-*")
    run, disk, owed, records, events = RunDir(folder), Disk(runs, is_empty=True), {}, [], 0
    for call in calls:
        if not call.paths[-1].is_relative_to(folder) and not (call.name in SYNCS and call.paths[-1] == runs):
            continue
        is_event = call.name.startswith(("write", "pwrite")) and call.paths[0] == run.journal_file
        if is_event or call.process in owed:  # the calls of a process after it has written an event, or renamed a file
            wanted = owed.pop(call.process, None)
            assert wanted in (None, call.paths[0]) and (is_event or call.name in SYNCS), f"{wanted} is not synced"
        if call.name in MOVES and call.paths[1].name not in VIEWS:
            assert disk.unsure_within(call.paths[0]) == [], f"it gets the name {call.paths[1].name} too early"
            if call.paths[1] == run.batch_script:
                assert disk.unsure(run.config_file) == disk.unsure(run.journal_file) == []
            records.append(str(call.paths[1].relative_to(folder)))
            owed[call.process] = call.paths[1].parent
        if is_event:
            owed[call.process], events = run.journal_file, events + 1
            assert events == 1 or disk.unsure(run.lease_file) == [], "the lease comes before the attempt"
        disk.follow(call)
    assert (owed, events) == ({}, 3), "the end of the attempt and of the run are one write"
    assert {"config.yaml", "lease.json", "supervisor.json", "ends/1/0.json", "submitit/job.sh"} <= set(records)
    assert disk.unsure(run.journal_file) == []
