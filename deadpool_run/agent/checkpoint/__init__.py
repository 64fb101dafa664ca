"""Durable checkpoints: when one is written, by whom, and loading the newest. Node and cluster import it."""
