"""Child processes: the fork server, workers, the store."""
