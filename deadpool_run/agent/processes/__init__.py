"""Child processes: the fork server, workers, the store. Node and checkpoint import it."""
