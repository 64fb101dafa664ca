"""The status of a live run: once, at each change, or on a terminal with keys, sorting and scrolling."""
