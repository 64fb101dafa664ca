"""What a run leaves behind: its record, logs, outcome, error files. All of agent imports it."""
