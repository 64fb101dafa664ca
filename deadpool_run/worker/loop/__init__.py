"""The training loop: steps, repairs, batches."""
