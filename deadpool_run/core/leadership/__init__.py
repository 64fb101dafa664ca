"""The election of the leader, and takeovers. The agent drives elections; the core handles takeovers."""
