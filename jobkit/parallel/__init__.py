"""A model over ranks: its parts, its gradients, its devices. Knows no loop, no samples of a run, no files."""
