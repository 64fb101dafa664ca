"""Files of a run: its record, logs and error files."""
