"""Fixtures of all tests."""

pytest_plugins = ["slurmbox.pytest_plugin"]
