"""Files of a run: its record, logs and error files. All of agent imports it."""
