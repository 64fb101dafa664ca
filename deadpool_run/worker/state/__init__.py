"""The objects that the script protects: tensors, optimizers, gradients, random states, digests."""
