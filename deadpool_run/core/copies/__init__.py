"""Which versions are complete, and which nodes hold copies. Recovery and the handlers import it."""
