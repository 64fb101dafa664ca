"""The agent of a node: starts the workers, watches them, ends them."""
