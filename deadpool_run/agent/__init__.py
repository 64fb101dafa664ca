"""The process of a node: starts, watches and ends workers."""
