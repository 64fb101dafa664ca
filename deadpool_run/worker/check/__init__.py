"""The worker's side of `deadpool-run check`."""
