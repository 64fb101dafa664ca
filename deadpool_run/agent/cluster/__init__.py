"""Nodes together: leadership, the leader and its followers, the node of an agent in them. Only the agent imports it."""
