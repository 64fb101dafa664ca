"""What users are shown of a run."""
