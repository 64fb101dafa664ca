"""The runs of this machine, live and ended: requests to them, and their records, logs and journals."""
