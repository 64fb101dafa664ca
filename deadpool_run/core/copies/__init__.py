"""Complete versions, and the nodes that hold copies."""
