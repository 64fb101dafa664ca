"""Process groups that survive a repair: collectives, connections, and their registry."""
