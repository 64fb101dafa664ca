"""Connections between agents: handshake, message streams, and the leader's connections with all nodes."""
