"""The live status on a terminal: keys, sorting, scrolling. Imports `agent.records`, `view` and below, and `cli.runs`."""
