"""Complete versions, and the nodes that hold copies. Recovery and the handlers import it."""
