"""From a Config to a job: plan, checks, the batch script, the transaction, the follower. Nothing of it
lives on once the job does."""
