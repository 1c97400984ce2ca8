"""Runs of jobkit and of others through failures, by discrete events: tools/bench/simulate.py is the command."""
