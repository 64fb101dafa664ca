"""Torch's private names: the only modules that use them. All of worker may import it."""
