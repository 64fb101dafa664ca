"""The checkpointer process: durable checkpoints of the snapshots. The agent starts it; nothing imports it."""
