"""Outside the job: plan, submit, supervise, decide. Nothing in here imports torch."""
