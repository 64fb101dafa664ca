"""The training process: with `integrations`, the only package that imports torch. The agent starts it and does not import it."""
