"""Nodes together: rendezvous, leadership, the leader and its followers. Only the agent imports it."""
