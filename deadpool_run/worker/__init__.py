"""What runs in a training process: the only package that imports torch."""
