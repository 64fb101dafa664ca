"""The training loop: steps, repairs, batches. The job and the check import it."""
