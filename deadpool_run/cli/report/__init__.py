"""The report of a run: its history from the run directory, the page with its charts, and a trace."""
