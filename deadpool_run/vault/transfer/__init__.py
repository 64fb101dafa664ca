"""Copies of slots on other nodes: streams, sender, receiver, fetching."""
