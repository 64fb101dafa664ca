"""Copies of slots on other nodes: streams, sender, receiver, fetching. Agent and command line import it."""
