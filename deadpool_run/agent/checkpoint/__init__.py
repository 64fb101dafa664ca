"""Durable checkpoints: the leader's schedule and attempts, a node's part, loading the newest."""
