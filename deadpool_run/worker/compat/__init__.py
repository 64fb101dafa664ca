"""The only modules that use torch's private names. All of worker may import it."""
