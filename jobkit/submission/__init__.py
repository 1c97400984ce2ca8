"""From a YAML to a job: plan, checks, the batch script, the transaction, the follower."""
