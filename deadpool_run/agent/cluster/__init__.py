"""Nodes together: leadership, the leader and its followers, and the part of this node."""
