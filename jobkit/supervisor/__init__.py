"""The supervisor of a job: it starts agents, decides about attempts, and is the one writer of the journal."""
