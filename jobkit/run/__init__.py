"""A run on disk: its config, its files, its journal and what follows from them. Nothing here starts a process."""
