"""The training loop of a rank: ctx, the agreement between steps, saves, tracked state. Starts no process."""
