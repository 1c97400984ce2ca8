"""A run on disk: its config, its files, its journal, and conclusions from them. Nothing here starts a process."""
