"""The checkpointer process, which writes and loads durable checkpoints. The agent starts it; no other folder imports it."""
