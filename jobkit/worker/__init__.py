"""The life of a rank around the training function: its start, its place, its end. Watches no other process."""
