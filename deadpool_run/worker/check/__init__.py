"""The worker's side of `deadpool-run check`. Only the job imports it."""
