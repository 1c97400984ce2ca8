"""The verbs of `python -m jobkit`, a file each."""
