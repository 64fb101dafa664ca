"""From options to a job on one node, on several, or under Slurm."""
