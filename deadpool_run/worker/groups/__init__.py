"""Process groups that survive a repair: collectives, connecting, the transcript. The loop imports it."""
