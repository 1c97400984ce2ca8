"""What several tests share: a user's project, groups of ranks, waiting."""
