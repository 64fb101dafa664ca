"""Who leads, and how a new leader takes over. The agent drives elections; the core handles takeovers."""
