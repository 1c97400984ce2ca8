"""Before the job: the plan, the batch script, the submission. Never imports torch."""
