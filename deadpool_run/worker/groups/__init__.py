"""Process groups that survive a repair: collectives, connections, the transcript. The loop imports it."""
