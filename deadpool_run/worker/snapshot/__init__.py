"""Snapshots of the protected state: capture, background copy, restore."""
