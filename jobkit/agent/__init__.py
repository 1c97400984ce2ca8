"""The process of each node of a job: it forks ranks, watches them, and outlives them. Decides about no attempt."""
