"""Snapshots of the protected state: captured, copied in the background, restored. The loop imports it."""
