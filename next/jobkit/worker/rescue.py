"""An agent whose batch script is gone closes the attempt and puts the run into the queue again.

    alone.py --fork--> close_and_requeue(): attempt.rescue --Decision--> requeue.start_again

Each agent tries; the begin lock and the lease let only one of them act.
"""

from __future__ import annotations

from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.slurm import jobs, nodes
from jobkit.supervisor.attempt import Me, rescue
from jobkit.supervisor.protocol import Hello
from jobkit.supervisor.requeue import start_again


def close_and_requeue(run: RunDir, hello: Hello) -> None:
    """Act for the supervisor of supervisor.json. Raises what stands against it: then it is to be tried again."""
    lease, contact = run.lease(), run.contact()
    if lease is None or contact is None:
        raise OSError(f"{run.lease_file} or {run.contact_file}: cannot be read")
    job, dead_node = None, None
    try:
        job = jobs.show(hello.job_id)
        if lease.node is not None and not nodes.slurmd_answers(lease.node):
            dead_node = lease.node
    except SchedulerError as error:  # the requeue waits for Slurm, the decision does not
        log.warning("%s", error)
    me = Me(job_id=hello.job_id, token=lease.token, restart=hello.restart, node=lease.node, job=job)
    tenure = rescue(run, me, contact.writer, dead_node)
    if tenure is not None and tenure.decision is not None:
        lost = [] if dead_node is None else [dead_node]
        start_again(me, tenure.journal, tenure.config, tenure.decision, lost)
