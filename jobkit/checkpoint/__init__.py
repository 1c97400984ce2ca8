"""State on the disk and in memory: trees of tensors, shards, snapshots, restore. Never decides when a run saves."""
