"""Checks before a launch, and the text of `--dry-run`."""
