"""Places where agents find their job and each other: rendezvous, the run's shared folder, the leader file, the port for other agents."""
