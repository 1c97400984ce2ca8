"""The verbs of `python -m jobkit`, a file each: they read, ask and show. None trains, and
none writes a journal while a supervisor lives."""
