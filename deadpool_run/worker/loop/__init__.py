"""The training loop: steps, repairs, batches. Only the job imports it."""
