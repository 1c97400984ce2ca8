"""The processes on a node: the agent, and the ranks that it forks."""
