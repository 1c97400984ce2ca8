"""Copies of a run's curves at other services, made beside the training by a process of its own. No torch."""
